"""Flags are the fields of ServeOptions and EngineConfig; errors are one line without a traceback."""

import os
import pwd
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.metadata import version
from itertools import chain
from pathlib import Path
from typing import NoReturn

import pytest

import proa_engine.cli
import proa_gateway.cli
from proa.options import from_arguments
from proa.tls import TlsFiles
from proa_engine.cli import main, make_parser
from proa_engine.config import FITTING_LENGTH, EngineConfig, PeerTls
from proa_engine.option_groups import Parallel
from proa_engine.server.options import ServeOptions
from support.processes import free_port


def parse(line: str) -> ServeOptions:
    return from_arguments(ServeOptions, make_parser().parse_args(line.split()))


def test_defaults_are_those_of_the_dataclasses() -> None:
    assert parse("serve --model builtin") == ServeOptions(config=EngineConfig(model="builtin"))


def test_flags_carry_vllms_names() -> None:
    options = parse(
        "serve --model m --quantization fp8 --max-model-len 64 --no-enable-prefix-caching --no-async-scheduling "
        "--gpu-memory-utilization 0.5 --scheduling-policy priority --dtype bfloat16 --tensor-parallel-size 3 "
        "--skip-tokenizer-init --worker-socket /a --worker-socket /b"
    )

    assert options.config == EngineConfig(
        model="m",
        quantization="fp8",
        max_model_len=64,
        enable_prefix_caching=False,
        async_scheduling=False,
        gpu_memory_utilization=0.5,
        scheduling_policy="priority",
        dtype="bfloat16",
        parallel=Parallel(tensor_parallel_size=3, worker_sockets=("/a", "/b")),
        skip_tokenizer_init=True,
    )


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["serve", "--model", "m", "--dtype", "float8"],
        ["serve", "--model", "m", "--max-num-seqs", "many"],
        ["serve", "--model", "m", "--max-model-len", "most"],
        ["serve", "--model", "m", "--hf-overrides", "[1]"],
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
        (
            ["--tls-cert", "a", "--tls-key", "b", "--kv-offloading-size", "1", "--kv-transfer-address", ":50061"],
            "--kv-transfer-address with --tls-cert needs --tls-ca too",
        ),
        (
            ["--tls-cert", "a", "--tls-key", "b", "--tensor-parallel-size", "2", "--nnodes", "2", "--master-addr", "h"],
            "--nnodes with --tls-cert needs --tls-ca too",
        ),
        (["--kv-offloading-path", "/dev/shm/proa"], "kv_offloading_path needs kv_offloading_size"),
        (["--port", "70000"], "port must be at most 65535, got 70000"),
        (["--served-model-name", ""], "served_model_name must not be empty"),
        (["--override-generation-config", '{"max_tokens": 5}'], "override_generation_config cannot change max_tokens"),
        (["--max-num-seqs", "0"], "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_inconsistent_values_exit_with_2(
    arguments: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["serve", "--model", "m", *arguments]) == 2
    assert sentence in capsys.readouterr().err


def test_a_model_is_required(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve"]) == 2
    assert capsys.readouterr().err == "proa-engine: error: the flag --model is required\n"


def test_movers_and_nodes_have_the_certificate_of_the_server() -> None:
    tls = TlsFiles(certificate=Path("a.crt"), key=Path("a.key"), authority=Path("ca.crt"))
    options = ServeOptions(config=EngineConfig(model="m"), tls=tls)
    assert options.engine_config.peer_tls == PeerTls("a.crt", "a.key", "ca.crt")
    assert ServeOptions(config=EngineConfig(model="m")).engine_config.peer_tls is None


@pytest.mark.parametrize(
    ("flags", "name", "aliases"),
    [
        ("", "m", ()),
        ("--served-model-name big", "big", ()),
        ("--served-model-name big org/big --served-model-name gpt-4 big", "big", ("org/big", "gpt-4")),
    ],
)
def test_a_model_may_have_several_names(flags: str, name: str, aliases: tuple[str, ...]) -> None:
    config = parse(f"serve --model m {flags}").config
    assert (config.model_name, config.model_aliases) == (name, aliases)


def test_sizes_have_vllms_units() -> None:
    config = parse("serve --model m --max-model-len 32k --max-num-batched-tokens 8K --kv-cache-memory-bytes 2g").config
    assert (config.max_model_len, config.max_num_batched_tokens) == (32_000, 8192)
    for text in ("auto", "-1"):
        assert parse(f"serve --model m --max-model-len {text}").config.max_model_len == FITTING_LENGTH
    assert config.kv_cache_memory_bytes == 2_000_000_000


def test_changes_of_a_models_configuration_are_json(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_OVERRIDE_GENERATION_CONFIG", '{"top_k": 5}')
    arguments = make_parser().parse_args(["serve", "--model=m", '--hf-overrides={"rope_parameters": {"factor": 2}}'])
    config = from_arguments(ServeOptions, arguments, os.environ).config
    assert config.hf_overrides == {"rope_parameters": {"factor": 2}}
    assert config.override_generation_config == {"top_k": 5}


def test_adapters_are_given_in_vllms_forms() -> None:
    given = ["--lora-modules", "a=/a", '{"name": "b", "path": "/b"}', "--lora-modules", "c=/c"]
    arguments = make_parser().parse_args(["serve", "--model", "m", "--enable-lora", *given])

    modules = from_arguments(ServeOptions, arguments).config.lora.lora_modules

    assert [(each.name, each.path) for each in modules] == [("a", "/a"), ("b", "/b"), ("c", "/c")]


@pytest.mark.parametrize("main", [proa_engine.cli.main, proa_gateway.cli.main])
def test_version(main: Callable[[list[str]], object], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        main(["--version"])

    assert not left.value.code
    assert capsys.readouterr().out.strip() == version("proa-engine") == version("proa-gateway")


def test_a_user_without_a_home_keeps_caches_in_the_temporary_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> NoReturn:
        raise KeyError("uid not found")

    monkeypatch.delenv("HOME")
    monkeypatch.setattr(pwd, "getpwuid", refuse)
    assert main(["download", "--model", "/nowhere"]) == 1
    assert Path.home() == Path(tempfile.gettempdir())


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "proa_engine.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("flag", ["--port", "--metrics-port", "--health-port"])
def test_a_port_in_use_is_named_with_its_flag(flag: str) -> None:
    ports = {name: str(free_port()) for name in ("--port", "--metrics-port", "--health-port")}
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", int(ports[flag])))
        taken.listen()
        done = run("serve", "--model", "m", "--host", "127.0.0.1", *chain(*ports.items()))

    assert done.returncode == 1
    assert f"on 127.0.0.1:{ports[flag]} ({flag}): " in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_server_and_llm_import_torch_only_when_a_model_is_loaded() -> None:
    script = "import sys, proa_engine.server.serve, proa_engine.offline.llm; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", script], timeout=60).returncode == 0
