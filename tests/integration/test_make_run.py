"""`make run`, as a newcomer uses it: a request streams, Ctrl-C stops everything."""

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from openai import OpenAI

from support.processes import free_port
from support.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]


@pytest.fixture
def make_run(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """`make run` in a process group of its own, as a shell starts it, and the gateway's port."""
    model, port = make_tiny_model(tmp_path / "model"), free_port()
    command = ["make", "run", f"MODEL={model}", f"PORT={port}", "TENSOR_PARALLEL=2"]
    with subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        watchdog = threading.Timer(240, os.killpg, (process.pid, signal.SIGTERM))
        watchdog.start()
        try:
            yield process, port
        finally:
            watchdog.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.timeout(300)
def test_request_streams_and_ctrl_c_leaves_no_process(make_run: tuple[subprocess.Popen[str], int]) -> None:
    process, port = make_run
    assert process.stdout is not None
    lines: list[str] = []
    while "curl -N" not in "".join(lines[-1:]):
        line = process.stdout.readline()
        assert line, "".join(lines)
        lines.append(line)

    with OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client:
        messages = [{"role": "user", "content": "Hello!"}]
        model = client.models.list().data[0].id
        stream = client.chat.completions.create(model=model, messages=messages, stream=True, max_tokens=8)
        reasons = [chunk.choices[0].finish_reason for chunk in stream]
    assert reasons[-1] in ("length", "stop")

    descendants = psutil.Process(process.pid).children(recursive=True)
    assert len(descendants) >= 4  # scripts/run, the engine, its second rank, the gateway
    os.killpg(process.pid, signal.SIGINT)
    remaining = process.stdout.read()
    process.wait(60)
    assert "killed" not in remaining, remaining
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive
