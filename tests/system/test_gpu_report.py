"""`make gpu-report` with a tiny model on a CPU: every program of it runs, and what is done is not done again."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.shape_models import make_shape_model

PROGRAM = Path(__file__).parents[1] / "benchmarks" / "gpu_report.py"
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
TESTS = """
def test_that_holds(): pass
def test_that_does_not(): assert 1 == 2
"""


def run(*arguments: object) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, str(PROGRAM), *map(str, arguments)]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    return subprocess.run(command, capture_output=True, text=True, env=environment)


@pytest.mark.timeout(300)
def test_every_stage_is_measured_once(tmp_path: Path) -> None:
    model, tests, out = make_shape_model(tmp_path, TINY), tmp_path / "test_card.py", tmp_path / "out"
    tests.write_text(TESTS)
    command = ("--out", out, "--small", model, tests)
    first = run(*command)
    assert first.returncode == 0, first.stderr
    correctness, figures = (json.loads((out / f"{name}.json").read_text()) for name in ("correctness", "Qwen3-0.6B"))
    [record] = correctness["records"].values()
    assert (record["passed"], list(record["failed"]), record["complete"]) == (1, ["test_that_does_not"], True)
    assert figures["problems"] == {}
    assert all(record["value"] > 0 for record in figures["records"].values() if "value" in record)
    assert set(figures["records"]) >= {"ngram/start", "ngram/mixed", "ngram/repetitive-2", "http-4x2"}
    assert figures["records"]["ngram/profile-decode-2"]["kernels"]
    assert "test_that_does_not" in (out / "report.md").read_text()
    again = run(*command)
    assert again.returncode == 0
    assert ".py" not in again.stdout.partition("# GPU report")[0], "no program was started"


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    done = run("--out", tmp_path / "out")
    assert done.returncode == 1
    assert done.stdout.startswith("gpu-report: there is no GPU here")
