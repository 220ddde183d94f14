"""Flags are EngineConfig's fields, and mistakes are told in a sentence."""

import socket
import subprocess
import sys
from dataclasses import fields

import pytest

from proa_engine.cli import HELP, config_from_arguments, main, make_parser
from proa_engine.config import EngineConfig


def test_every_field_of_the_config_has_a_flag_and_a_help_text() -> None:
    assert set(HELP) == {field.name for field in fields(EngineConfig)}


def test_defaults_are_those_of_the_config() -> None:
    arguments = make_parser().parse_args(["serve", "--model", "builtin"])

    assert config_from_arguments(arguments) == EngineConfig(model="builtin")
    assert (arguments.host, arguments.port, arguments.metrics_port) == ("0.0.0.0", 50051, 9400)


def test_flags_carry_vllms_names() -> None:
    line = (
        "serve --model m --max-model-len 64 --no-enable-prefix-caching --no-async-scheduling --skip-tokenizer-init "
        "--gpu-memory-utilization 0.5 --scheduling-policy priority --dtype bfloat16 --tensor-parallel-size 3 "
        "--worker-socket /a --worker-socket /b"
    )
    arguments = make_parser().parse_args(line.split())

    assert config_from_arguments(arguments) == EngineConfig(
        model="m",
        max_model_len=64,
        enable_prefix_caching=False,
        async_scheduling=False,
        gpu_memory_utilization=0.5,
        scheduling_policy="priority",
        dtype="bfloat16",
        tensor_parallel_size=3,
        worker_sockets=("/a", "/b"),
        skip_tokenizer_init=True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve"],
        ["serve", "--model", "m", "--dtype", "float8"],
        ["serve", "--model", "m", "--port", "70000"],
        ["serve", "--model", "m", "--max-num-seqs", "many"],
        ["serve", "--model", "m", "--drain-timeout", "-1"],
        ["worker", "--rank", "1"],
    ],
)
def test_bad_arguments_exit_with_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(arguments)

    assert left.value.code == 2
    assert "error:" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--tls-cert", "a.crt"], "give both --tls-cert and --tls-key"),
        (["--tls-ca", "a.crt"], "--tls-ca needs --tls-cert and --tls-key"),
    ],
)
def test_half_of_a_tls_identity_is_refused(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "m", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proa_engine.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def test_port_in_use_is_told_in_a_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        done = run("serve", "--model", "m", "--host", "127.0.0.1", "--port", str(port), "--metrics-port", "0")

    assert done.returncode == 1
    assert f"cannot listen on 127.0.0.1:{port}" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_front_doors_import_no_torch_before_they_load() -> None:
    script = "import sys, proa_engine.server.serve, proa_engine.llm; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
