"""`make run` with its defaults: a request streams, Ctrl-C stops all processes."""

import os
import re
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from openai import OpenAI

from support.processes import free_port
from support.tiny_models import make_tiny_model

ROOT = Path(__file__).parents[2]


class MakeRun:
    """`make run` in a process group of its own, as a shell starts it."""

    def __init__(self, process: subprocess.Popen[str], port: int) -> None:
        assert process.stdout is not None
        self.process = process
        self.output = process.stdout
        self._port = port

    def wait_until_ready(self) -> list[str]:
        """The lines up to the last one that says how to use the model."""
        lines: list[str] = []
        while "curl -N" not in "".join(lines[-1:]):
            line = self.output.readline()
            assert line, "".join(lines)
            lines.append(line)
        return lines

    def client(self) -> OpenAI:
        return OpenAI(base_url=f"http://127.0.0.1:{self._port}/v1", api_key="none", max_retries=0)


@contextmanager
def make_run(*variables: str) -> Iterator[MakeRun]:
    port = free_port()
    environment = {name: value for name, value in os.environ.items() if name not in ("MODEL", "ARGS", "VIRTUAL_ENV")}
    with subprocess.Popen(
        ["make", "run", f"PORT={port}", *variables],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        watchdog = threading.Timer(240, os.killpg, (process.pid, signal.SIGTERM))
        watchdog.start()
        try:
            yield MakeRun(process, port)
        finally:
            watchdog.cancel()
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)


@pytest.mark.timeout(300)
def test_request_streams_and_ctrl_c_stops_every_process(tmp_path: Path) -> None:
    with make_run(f"MODEL={make_tiny_model(tmp_path / 'model')}", "ARGS=-tp 2") as run:
        run.wait_until_ready()
        with run.client() as client:
            messages: Any = [{"role": "user", "content": "Hello!"}]
            model = client.models.list().data[0].id
            stream: Any = client.chat.completions.create(model=model, messages=messages, stream=True, max_tokens=8)
            reasons = [chunk.choices[0].finish_reason for chunk in stream]
        assert reasons[-1] in ("length", "stop")

        descendants = psutil.Process(run.process.pid).children(recursive=True)
        assert len(descendants) >= 4  # proa serve, the engine, its second rank, the gateway
        os.killpg(run.process.pid, signal.SIGINT)
        remaining = run.output.read()
        run.process.wait(60)
        assert "killed" not in remaining, remaining
        assert "***" not in remaining, remaining  # make's errors
        _, alive = psutil.wait_procs(descendants, timeout=5)
        assert not alive


@pytest.mark.timeout(300)
def test_default_model_is_the_builtin_one() -> None:
    with make_run() as run:
        lines = run.wait_until_ready()
        ready = r"proa: ready after .*, in a browser a chat page\. Ctrl-C stops\. In another shell:"
        chat = r"  \.venv/bin/proa chat --url http://127\.0\.0\.1:\d+/v1"
        assert re.search(rf"^{ready}\n(.*\n)*{chat}$", "".join(lines), re.MULTILINE)
        assert not [line for line in lines if "not connected" in line or "WARNING" in line]
        with run.client() as client:
            question: Any = [{"role": "user", "content": "What is the capital of France?"}]
            answer = client.chat.completions.create(model="proa-builtin", messages=question, temperature=0)
    assert answer.choices[0].message.content == "The capital of France is Paris."
