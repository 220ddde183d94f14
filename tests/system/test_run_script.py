"""`scripts/run` with fake programs: it announces when it is ready, and always stops all processes."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from support.processes import free_port

ROOT = Path(__file__).parents[2]

# Exits on SIGTERM, but its child process must be killed.
FAKE_ENGINE = f"""#!{sys.executable}
import subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo deaf; exec sleep 999"], stdout=subprocess.PIPE)
child.stdout.readline()
print("arguments", *sys.argv[1:], flush=True)
time.sleep(999)
"""
FAKE_GATEWAY = f"""#!{sys.executable}
import os, sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        key = os.environ.get("PROA_API_KEY")
        allowed = key is None or self.path == "/ready" or self.headers["Authorization"] == "Bearer " + key
        self.answer(200 if allowed else 401)

    def do_POST(self):
        self.answer(200 if self.path in os.environ.get("ANSWERED", "/v1/chat/completions").split() else 400)

    def answer(self, status):
        self.send_response(status)
        self.end_headers()
        self.wfile.write(b'{{"data": [{{"id": "fake-model"}}]}}')

print("flags", sys.argv[1:], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


class Run:
    """A running `scripts/run` with fake programs, read line by line."""

    def __init__(self, folder: Path, *arguments: str, engine: str = FAKE_ENGINE, **env: str) -> None:
        for name, text in (("proa-engine", engine), ("proa-gateway", FAKE_GATEWAY)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/run"), *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, "PATH": f"{folder}:{os.environ['PATH']}", **env},
        )
        assert self.process.stdout is not None
        self._output = self.process.stdout
        self.lines: list[str] = []
        self._watchdog = threading.Timer(60, self.process.kill)  # a hang fails the test instead of stopping the run
        self._watchdog.start()

    def read_until(self, text: str) -> None:
        for line in self._output:
            self.lines.append(line.rstrip())
            if text in line:
                return
        raise AssertionError(f"{text!r} was never printed:\n" + "\n".join(self.lines))

    def descendants(self) -> list[psutil.Process]:
        return psutil.Process(self.process.pid).children(recursive=True)

    def end(self) -> int:
        self.lines += self._output.read().splitlines()
        self._watchdog.cancel()
        return self.process.wait()

    def close(self) -> None:
        self.process.terminate()
        self.end()
        self._output.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    arguments = ("--model", "/models/a", "--tensor-parallel-size", "2", "--lora-modules", "a=/a", "b=/b")
    run = Run(tmp_path, *arguments, "--port", str(free_port()))
    yield run
    run.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_every_process(run: Run, number: signal.Signals) -> None:
    run.read_until("curl")
    descendants = run.descendants()
    assert len(descendants) == 3
    run.process.send_signal(number)
    assert run.end() == 0
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive


@pytest.mark.parametrize("name", ["proa-engine", "proa-gateway"])
def test_exit_of_one_program_stops_the_other(run: Run, name: str) -> None:
    run.read_until("curl")
    descendants = run.descendants()
    next(child for child in descendants if any(part.endswith(name) for part in child.cmdline())).kill()
    assert run.end() == 1
    assert run.lines[-1].startswith(f"run: the {name.removeprefix('proa-')} exited with status -9")
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive


def test_arguments_reach_the_engine_and_output_is_prefixed(run: Run) -> None:
    run.read_until("arguments")
    assert run.lines[-1].startswith(
        "engine  | arguments serve --model /models/a --tensor-parallel-size 2 "
        "--enable-lora --lora-modules=a=/a --lora-modules=b=/b --host"
    )


def test_further_flags_reach_the_gateway(tmp_path: Path) -> None:
    flags = """--gateway-args=--access-log --root-path '/my models'"""
    run = Run(tmp_path, "--port", str(free_port()), flags, "--", "true")
    run.read_until("flags")
    run.close()
    line = next(line for line in run.lines if "| flags" in line)
    assert line.endswith("'--access-log', '--root-path', '/my models']")


def test_ready_line_shows_a_request_for_the_served_model(run: Run) -> None:
    run.read_until("curl")
    assert any(line.startswith("run: ready after ") for line in run.lines)
    assert '"model": "fake-model"' in run.lines[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/rerank", "/classify", "/pooling"])
def test_a_model_that_answers_no_chats_gets_another_example(tmp_path: Path, path: str) -> None:
    run = Run(tmp_path, "--port", str(free_port()), ANSWERED=f"{path} /pooling")
    run.read_until("curl")
    run.close()
    assert f"{path} -H" in next(line for line in run.lines if "curl" in line)


def test_the_example_carries_the_key_of_the_environment(tmp_path: Path) -> None:
    run = Run(tmp_path, "--port", str(free_port()), PROA_API_KEY="sk-secret")
    run.read_until("curl")
    run.close()
    assert "Bearer $PROA_API_KEY" in next(line for line in run.lines if "curl" in line)
    assert "sk-secret" not in "".join(run.lines)


def test_the_reason_of_a_failed_start_is_the_last_line(tmp_path: Path) -> None:
    run = Run(tmp_path, "--port", str(free_port()), engine="#!/bin/sh\necho no such model\nexit 3\n")
    assert run.end() == 1
    run.close()
    assert run.lines[-1] == "run: the engine exited with status 3: no such model"


def test_a_port_in_use_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with socket.socket() as other:  # a server that would say that it is ready
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        run = Run(tmp_path, "--port", str(port))
        assert run.end() == 1
        run.close()
    assert run.lines == [
        f"run: cannot listen on 127.0.0.1:{port}: Address already in use; choose a port with PORT=8001"
    ]


def test_command_runs_when_ready_and_its_exit_stops_all(tmp_path: Path) -> None:
    run = Run(tmp_path, "--port", str(free_port()), "--", "sh", "-c", "echo done; exit 7")
    assert run.end() == 7
    run.close()
    assert run.lines[-1] == "command | done"


def test_proxy_is_not_used_for_the_local_gateway(tmp_path: Path) -> None:
    proxy = f"http://127.0.0.1:{free_port()}"  # nothing listens there
    run = Run(tmp_path, "--port", str(free_port()), "--", "true", http_proxy=proxy, HTTP_PROXY=proxy, no_proxy="")
    assert run.end() == 0
    run.close()
    assert any(line.startswith("run: ready after ") for line in run.lines)
