"""The command line, and the imports of the package."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from proa.options import from_arguments, options
from proa_gateway.cli import GRPC_EXPERIMENTS, main, make_parser
from proa_gateway.config import Deadlines, GatewayConfig
from proa_gateway.errors import InvalidRequest


def test_flags_become_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[GatewayConfig] = []
    monkeypatch.setattr("proa_gateway.server.serve", served.append)
    main(
        ["serve", "--engine", "a:1", "--engine", "b:2", "--port", "9", "--stream-interval", "3", "--drain-timeout", "7"]
    )
    config = served[0]
    assert config.engines == ("a:1", "b:2")
    assert (config.port, config.stream_interval, config.deadlines.shutdown) == (9, 3, 7.0)
    main(["serve", "--engine-service", "engine.proa:50051"])
    assert served[1].engine_service == "engine.proa:50051"


@pytest.mark.parametrize("arguments", ["--apikey sk-1", "--apikey=sk-1", "--api-kee=sk-1", "--operator_kee a sk-1"])
def test_the_error_of_an_unknown_flag_does_not_show_a_key(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--engine", "a:1", *arguments.split()])
    error = capsys.readouterr().err
    assert "sk-1" not in error
    assert arguments.split("=")[0].split()[0] in error


def test_every_field_has_help_text_and_defaults_are_those_of_the_configuration() -> None:
    for config in (GatewayConfig, Deadlines):
        assert all(declared.help for _, declared in options(config))
    arguments = make_parser().parse_args(["serve", "--engine", "a:1"])
    assert from_arguments(GatewayConfig, arguments) == GatewayConfig(engines=("a:1",))


def test_flags_set_queue_limits_models_and_api_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[GatewayConfig] = []
    monkeypatch.setattr("proa_gateway.server.serve", served.append)
    keys = tmp_path / "keys.json"
    keys.write_text('{"keys": [{"name": "a", "key": "b"}]}')
    waits = ["--queue-timeout", "7", "--scale-from-zero-timeout", "9.5", "--max-waiting-requests", "3"]
    main(["serve", "--engine", "a:1", *waits, "--model", "one", "--model", "two", "--api-keys", str(keys)])
    config = served[0]
    assert (config.deadlines.queue, config.deadlines.scale_from_zero, config.max_waiting_requests) == (7, 9.5, 3)
    assert (config.models, config.api_keys) == (("one", "two"), keys)


def test_api_keys_come_from_flags_or_from_a_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[GatewayConfig] = []
    monkeypatch.setattr("proa_gateway.server.serve", served.append)
    monkeypatch.setenv("PROA_API_KEY", "sk-0")
    main(["serve", "--engine", "a:1", "--api-key", "sk-1", "--api-key", "sk-2"])
    main(["serve", "--engine", "a:1"])
    assert [config.api_key for config in served] == [("sk-1", "sk-2"), ("sk-0",)]


def test_a_chat_template_is_read_from_a_file_or_given_as_text(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    served: list[GatewayConfig] = []
    monkeypatch.setattr("proa_gateway.server.serve", served.append)
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    for given in (str(file), "{{ messages[0] }}"):
        main(["serve", "--engine", "a:1", "--chat-template", given])
    assert [config.chat_template for config in served] == ["{{ messages }}", "{{ messages[0] }}"]


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"{% if %}", "the chat template does not compile: Expected an expression"),
        (b"\xff", "chat.jinja' is not valid UTF-8"),
        (b"x" * 1_000_000, "the chat template has more than 131,072 characters"),
        (b"{{ " + b"(" * 999 + b"1" + b")" * 999 + b" }}", "the chat template does not compile: it nests too deeply"),
        (None, "chat.jinja' is neither a file nor a template"),
    ],
)
def test_a_chat_template_that_cannot_be_used_is_refused_with_its_flag(
    data: bytes | None, error: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "chat.jinja"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(SystemExit):
        main(["serve", "--engine", "a:1", "--chat-template", str(file)])
    line = capsys.readouterr().err.splitlines()[-1]
    assert "argument --chat-template: " in line
    assert error in line


@pytest.mark.parametrize(
    "arguments",
    [
        ["serve"],
        ["serve", "--engine", "nowhere"],
        ["serve", "--engine", "a:1", "--tls-cert", "a.crt", "--tls-key", "a.key"],
        ["serve", "--engine", "a:1", "--tls-ca", "/nowhere/ca.crt"],
        ["serve", "--engine", "a:1", "--engine-service", "b.c:2"],
        ["serve", "--engine-service", "engine:50051"],
        ["serve", "--engine", "a:1", "--tokenizer", "/nowhere"],
        ["serve", "--engine", "a:1", "--max-concurrent-requests", "0"],
        ["serve", "--engine", "a:1", "--queue-timeout", "-1"],
        ["serve", "--engine", "a:1", "--scale-from-zero-timeout", "long"],
        ["serve", "--engine", "a:1", "--api-keys", "/nowhere"],
        ["serve", "--engine", "a:1", "--api-key", " "],
        ["serve", "--engine", "a:1", "--chat-template", "/nowhere"],
        ["serve", "--engine", "a:1", "--chat-template", "{{ unclosed"],
    ],
)
def test_wrong_arguments_end_with_an_error_message(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    assert "error:" in capsys.readouterr().err


def test_the_gateway_never_imports_torch_or_the_engine() -> None:
    code = "import sys, proa_gateway.server; print([n for n in ('torch', 'triton', 'proa_engine') if n in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=Path("/"))
    assert printed.stdout.strip() == "[]"


def test_grpc_knows_the_experiment_that_the_gateway_turns_off() -> None:
    command = [sys.executable, "-c", "import grpc; grpc.insecure_channel('127.0.0.1:1').close()"]
    for experiment, is_unknown in ((GRPC_EXPERIMENTS, False), ("-none_such", True)):
        environment = {**os.environ, "GRPC_EXPERIMENTS": experiment}
        printed = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
        assert ("Unknown experiment" in printed.stderr) == is_unknown, printed.stderr


def test_an_error_that_quotes_a_lone_surrogate_can_be_sent() -> None:
    error = InvalidRequest("The field \ud800 is wrong.", param="\ud800").to_dict()["error"]
    assert (error["message"], error["param"]) == ("The field ? is wrong.", "?")
