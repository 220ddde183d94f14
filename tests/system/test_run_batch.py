"""`proa-gateway run-batch` as a process."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from support.processes import fake_engine_process, gateway_process

REQUEST = {"method": "POST", "url": "/v1/completions", "body": {"prompt": "Hi", "max_tokens": 4}}


def run_batch(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    files = ["-i", str(folder / "in.jsonl"), "-o", str(folder / "out.jsonl")]
    command = [sys.executable, "-m", "proa_gateway", "run-batch", *files, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def write_requests(folder: Path, *changes: dict[str, Any]) -> None:
    lines = [json.dumps({**REQUEST, "custom_id": str(index), **each}) for index, each in enumerate(changes)]
    (folder / "in.jsonl").write_text("\n".join(lines))


@pytest.mark.parametrize("in_process", [True, False])
def test_a_batch_is_answered_and_continued(in_process: bool, tmp_path: Path) -> None:
    with fake_engine_process("--text", "Some words.") as (_, engine), gateway_process(engine) as (_, port):
        target = ["--engine", engine] if in_process else ["--url", f"http://127.0.0.1:{port}"]
        write_requests(tmp_path, {}, {})
        first = run_batch(tmp_path, *target)
        assert first.returncode == 0, first.stderr
        assert "2 lines done, 0 failed" in first.stderr
        write_requests(tmp_path, {}, {}, {"url": "/no/such"})
        second = run_batch(tmp_path, *target)
    assert second.returncode == 1, second.stderr
    assert "1 lines done, 1 failed" in second.stderr
    assert "2 answered before" in second.stderr
    outputs = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert {each["custom_id"]: each["response"]["status_code"] for each in outputs} == {"0": 200, "1": 200, "2": 404}


def test_files_that_cannot_be_used_end_with_a_message(tmp_path: Path) -> None:
    missing = run_batch(tmp_path, "--url", "http://127.0.0.1:9")
    write_requests(tmp_path, {})
    (tmp_path / "out.jsonl").write_text("notes\n")
    wrong = run_batch(tmp_path, "--url", "http://127.0.0.1:9")
    assert (missing.returncode, wrong.returncode) == (2, 2)
    assert "in.jsonl" in missing.stderr
    assert "line 1 is not the output of a batch" in wrong.stderr
