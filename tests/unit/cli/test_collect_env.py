"""`proa collect-env`: finds what there is, hides secrets, and fails for nothing that is missing."""

from pathlib import Path

import pytest

from proa_cli import collect_env
from proa_cli.main import main

NVIDIA_SMI = """#!/bin/sh
case "$1" in
topo) echo "GPU0 X NV18" ;;
*) echo "0, NVIDIA H100, 81559 MiB, 9.0, 580.65, Disabled"; echo "1, NVIDIA H100, 81559 MiB, 9.0, 580.65, Disabled" ;;
esac
"""


def test_secrets_are_masked_and_other_variables_left_out() -> None:
    environment = {
        "PROA_API_KEY": "sk-1",
        "HF_TOKEN": "hf-1",
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=sk-2",
        "PROA_OTLP_TRACES_ENDPOINT": "http://user:password@collector:4317",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
        "HOME": "/root",
    }
    assert dict(collect_env.variables(environment)) == {
        "PROA_API_KEY": "***",
        "HF_TOKEN": "***",
        "OTEL_EXPORTER_OTLP_HEADERS": "***",
        "PROA_OTLP_TRACES_ENDPOINT": "http://***@collector:4317",
        "NCCL_DEBUG": "INFO",
        "OMP_NUM_THREADS": "4",
    }


def test_a_machine_without_anything_is_described(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(collect_env, "_LIBRARIES", ("no-such-library",))
    lines = dict(collect_env._machine(tmp_path))
    assert (lines["memory"], lines["container"], lines["C compiler"]) == ("unknown", "none found", "none")
    assert main(["collect-env"]) == 0
    printed = capsys.readouterr().out
    assert "no-such-library: not installed" in printed
    assert "nvidia-smi: nvidia-smi is not installed" in printed


def test_each_gpu_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "nvidia-smi").write_text(NVIDIA_SMI)
    (tmp_path / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert main(["collect-env"]) == 0
    printed = capsys.readouterr().out
    assert "gpu 1: NVIDIA H100, 81559 MiB, 9.0, 580.65, Disabled\n" in printed
    assert "NV18" in printed


def test_the_packages_of_this_environment_have_their_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["collect-env"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for name in ("proa-engine", "torch", "grpcio"):
        (line,) = (each for each in lines if each.startswith(f"{name}: "))
        assert line[-1].isdigit()
