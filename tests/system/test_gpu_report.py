"""The GPU report with a tiny model on a CPU: its programs run, what is done is not done again, and whatever is
killed, hangs or is missing costs only its own figures."""

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.report.gpu_report import Reporter
from benchmarks.report.report_stages import calls, in_small, smoke
from support.shape_models import make_shape_model
from support.thorough import THOROUGH

ROOT = Path(__file__).parents[2]
TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}
# What a broken device does to its process is played by the test that breaks it.
TESTS = """
import time, torch
def test_that_holds(): pass
def test_that_hangs(): time.sleep(600)
def test_that_breaks_the_device():
    def fail(): raise RuntimeError("illegal memory access")
    torch.cuda.is_initialized, torch.cuda.synchronize = (lambda: True), fail
    assert False
def test_behind_all_of_these():
    assert not torch.cuda.is_initialized()
"""
NEEDS_A_SWITCH = """
import os
def test_that_holds(): pass
def test_that_does_not(): assert os.environ.get("PROA_DEPENDENT_LAUNCH") == "0"
"""
# The limit of a test cannot end one that holds the interpreter, as a launch that never returns does.
HANGS_WITH_GRAPHS = """
import ctypes
def test_kernels(): pass
def test_engine(request):
    if not request.config.getoption("--enforce-eager"):
        ctypes.PyDLL(None).sleep(600)
"""


def start(*arguments: object) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "benchmarks.report.gpu_report", *map(str, arguments)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, cwd=ROOT
    )


def run(*arguments: object) -> tuple[int, str]:
    process = start(*arguments)
    output, _ = process.communicate()
    return process.returncode, output


def program(name: str, *arguments: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", f"benchmarks.{name}", *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, cwd=ROOT)


def stages(folder: Path) -> Any:
    return json.loads((folder / "results.json").read_text())["stages"]


def small(folder: Path, tests: str, call: int) -> list[object]:
    """Arguments of a report of a tiny model and of `tests`."""
    (folder / "test_card.py").write_text(tests)
    return ["--call", call, "--small", make_shape_model(folder, TINY), folder / "test_card.py"]


@pytest.mark.timeout(400)
def test_every_figure_is_measured_once(tmp_path: Path) -> None:
    arguments, first, second = small(tmp_path, "def test_that_holds(): pass", 5), tmp_path / "1", tmp_path / "2"
    arguments += ["--stages", "correctness", "Llama-3.1-8B"]
    status, output = run("--out", first, *arguments)
    assert status == 0, output
    figures = stages(first)["Llama-3.1-8B"]
    assert figures["problems"] == {}
    assert all(record["value"] > 0 for record in figures["records"].values() if "value" in record)
    http = {"serve-start", "http-2x1", "http-2x2"}
    assert set(figures["records"]) == http | {"closed-2", "own-mixed", "profile-prefill-2x16"}
    assert figures["records"]["profile-prefill-2x16"]["kernels"]
    assert stages(first)["preflight"]["records"]["http"]["problems"] == []
    status, output = run("--out", second, "--earlier", first, "--again", "Llama-3.1-8B/own-mixed", *arguments)
    assert status == 0, output
    assert "engine.speed for own-mixed\n" in output
    assert "http.serve" not in output
    assert "report.gpu_tests" not in output
    assert set(stages(second)["Llama-3.1-8B"]["records"]) == set(figures["records"])


@pytest.mark.timeout(1500)
@pytest.mark.skipif(not THOROUGH, reason="ten minutes: make test-all")
@pytest.mark.parametrize("call", range(1, len(calls()) + 1))
def test_a_call_runs_from_beginning_to_end(call: int, tmp_path: Path) -> None:
    out = tmp_path / "out"
    arguments = small(tmp_path, "def test_that_holds(): pass", call)
    status, output = run("--out", out, "--limit", 1400, *arguments)
    assert status == 0, output
    assert not [problem for stage in stages(out).values() for problem in stage["problems"].items()]
    model, tests = tmp_path, tmp_path / "test_card.py"
    steps = [in_small(step, model, tests) for step in calls()[call - 1] if step.needs != "peer"]
    for step in steps:
        assert set(step.names(step.workloads)) <= set(stages(out)[step.stage]["records"])


@pytest.mark.timeout(300)
def test_a_test_that_hangs_or_breaks_the_device_costs_no_other(tmp_path: Path) -> None:
    tests, path = tmp_path / "test_card.py", tmp_path / "records.json"
    tests.write_text(TESTS)
    done = program("report.gpu_tests", "--workloads", tests, "--json", path, "--processes=1", "--timeout=5")
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = json.loads(path.read_text())["records"].values()
    assert sorted(record["passed"]) == ["test_behind_all_of_these", "test_that_holds"]
    assert sorted(record["failed"]) == ["test_that_breaks_the_device", "test_that_hangs"]
    assert not record["complete"]


@pytest.mark.timeout(300)
def test_what_fails_is_tried_without_graphs_and_without_dependent_launch(tmp_path: Path) -> None:
    arguments, out = small(tmp_path, NEEDS_A_SWITCH, 1), tmp_path / "out"
    status, output = run("--out", out, "--stages", "correctness", *arguments)
    assert status == 0, output
    records, name = stages(out)["correctness"]["records"], str(tmp_path / "test_card.py")
    assert (records[name]["passed"], list(records[name]["failed"])) == (["test_that_holds"], ["test_that_does_not"])
    assert list(records[f"without CUDA graphs/{name}"]["failed"]) == ["test_that_does_not"]
    assert "test_that_does_not" in records[f"without dependent launch/{name}"]["passed"]
    assert "correctness: what failed passes without dependent launch" in output
    assert "without dependent launch" in (out / "report.md").read_text()


@pytest.mark.timeout(300)
def test_a_smoke_test_that_holds_the_interpreter_is_tried_in_other_modes(tmp_path: Path) -> None:
    (tests := tmp_path / "test_card.py").write_text(HANGS_WITH_GRAPHS)
    step = replace(smoke(), workloads=(str(tests),), arguments=("--processes=1", "--timeout=30"), seconds=90.0)
    with closing(Reporter(tmp_path, 240.0, tmp_path)) as reporter:
        reporter.results.stages["preflight"] = {"machine": "", "records": {"tests": {"complete": True}}, "problems": {}}
        reporter.run(step)
    stage = stages(tmp_path)["smoke"]
    assert stage["records"][str(tests)]["passed"] == ["test_kernels"]
    assert stage["problems"][str(tests)]["out_of_time"]
    assert stage["records"][f"without CUDA graphs/{tests}"]["complete"]
    assert reporter.mode.name == "without CUDA graphs"


@pytest.mark.timeout(300)
def test_a_killed_report_keeps_its_figures_and_leaves_nothing_running(tmp_path: Path) -> None:
    out = tmp_path / "out"
    report = start("--out", out, "--stages", "Qwen3-0.6B", *small(tmp_path, TESTS, 1))
    while "Qwen3-0.6B" not in (stages(out) if (out / "results.json").is_file() else {}):
        assert report.poll() is None
        time.sleep(0.02)
    programs = psutil.Process(report.pid).children(recursive=True)
    report.send_signal(signal.SIGKILL)
    report.communicate()
    assert stages(out)["Qwen3-0.6B"]["records"]
    assert programs
    _, alive = psutil.wait_procs(programs, timeout=60)
    assert not alive


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    status, output = run("--out", tmp_path / "out", "--call", 1)
    assert status == 1
    assert "there is no GPU here" in output
    assert "torch sees no GPU" in output


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("kernels.skinny_gemm", ["--workloads", "tiny", "--rows", "2"]),
        ("kernels.prefill_attention", ["--workloads", "Qwen3-0.6B", "--small"]),
        ("kernels.decode_attention", ["--workloads", "Qwen3-0.6B", "--small"]),
        ("report.gpu_tests", ["--workloads", "tests/gpu/test_gpu_smoke.py", "--processes=1", "--timeout=250"]),
    ],
)
def test_what_needs_kernels_runs_in_the_interpreter(name: str, arguments: list[str], tmp_path: Path) -> None:
    path = tmp_path / "records.json"
    done = program(name, *arguments, f"--json={path}", TRITON_INTERPRET="1")
    assert done.returncode == 0, done.stdout + done.stderr
    [record] = json.loads(path.read_text())["records"].values()
    assert record["complete"], record
    assert record.get("rows") or record["passed"]
