"""What `proa serve` runs, with fake programs: it announces when it is ready, and always stops all processes."""

import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import psutil
import pytest

from support.processes import free_port

# Exits on SIGTERM, but its child process must be killed.
FAKE_ENGINE = """
import subprocess, sys, time
child = subprocess.Popen(["sh", "-c", "trap '' TERM; echo deaf; exec sleep 999"], stdout=subprocess.PIPE)
child.stdout.readline()
print("arguments", *sys.argv[1:], flush=True)
time.sleep(999)
"""
FAKE_GATEWAY = """
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
        self.wfile.write(b'{"data": [{"id": "fake-model"}]}')

print("flags", sys.argv[1:], flush=True)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


RUN = """
import os, sys
from proa_cli.gateway import Gateway
from proa_cli.serve import run

gateway = Gateway(sys.argv[2], "fake-model", os.environ.get("KNOWN_KEY", ""))
sys.exit(run(eval(sys.argv[1]), gateway, sys.argv[3:]))
"""


class Run:
    """Running fake programs, read line by line."""

    def __init__(self, *command: str, engine: str = FAKE_ENGINE, drain_timeout: float = 0.0, **env: str) -> None:
        """`command`: what is run when the gateway is ready."""
        port = str(free_port())
        programs = [
            (name, [sys.executable, "-c", text, "--port", port], drain_timeout, b"")
            for name, text in (("engine", engine), ("gateway", FAKE_GATEWAY))
        ]
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, repr(programs), f"http://127.0.0.1:{port}", *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env={**os.environ, **env},
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

    def wait_until_started(self) -> None:
        """Wait for both programs, of which either may be the later one."""
        self.read_until("curl")
        if not any(line.startswith("engine  | ") for line in self.lines):
            self.read_until("engine  | ")

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
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.close()


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_signal_stops_every_process(run: Run, number: signal.Signals) -> None:
    run.wait_until_started()
    descendants = run.descendants()
    assert len(descendants) == 3
    run.process.send_signal(number)
    assert run.end() == 0
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive


DRAINING_ENGINE = """
import signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: print("draining", flush=True))
print("started", flush=True)
while True:
    time.sleep(0.1)
"""


def test_the_engine_drains_until_a_second_ctrl_c() -> None:
    run = Run(engine=DRAINING_ENGINE, drain_timeout=999.0)
    run.wait_until_started()
    run.process.send_signal(signal.SIGINT)
    run.read_until("draining")  # the gateway has exited
    assert len(run.descendants()) == 1
    run.process.send_signal(signal.SIGINT)
    assert run.end() == 0
    run.close()
    assert run.lines[-1] == "proa serve: the engine does not exit and is killed"


@pytest.mark.parametrize("name", ["engine", "gateway"])
def test_exit_of_one_program_stops_the_other(run: Run, name: str) -> None:
    run.read_until("curl")
    descendants = run.descendants()
    text = FAKE_ENGINE if name == "engine" else FAKE_GATEWAY
    next(child for child in descendants if text in child.cmdline()).kill()
    assert run.end() == 1
    assert run.lines[-1].startswith(f"proa serve: error: the {name} exited with status -9")
    _, alive = psutil.wait_procs(descendants, timeout=5)
    assert not alive


def test_output_has_the_name_of_the_program_in_front(run: Run) -> None:
    run.read_until("arguments")
    assert run.lines[-1].startswith("engine  | arguments --port ")


def test_ready_line_shows_a_request_for_the_served_model(run: Run) -> None:
    run.read_until("curl")
    assert any(re.match(r"proa: ready after .*, in a browser a chat page\. Ctrl-C stops\.", line) for line in run.lines)
    assert any(re.fullmatch(r"  proa chat --url http://127\.0\.0\.1:\d+/v1", line) for line in run.lines)
    assert '"model": "fake-model"' in run.lines[-1]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/embeddings", "/v1/rerank", "/classify", "/pooling"])
def test_a_model_that_answers_no_chats_gets_another_example(path: str) -> None:
    run = Run(ANSWERED=f"{path} /pooling")
    run.read_until("curl")
    run.close()
    assert f"{path} -H" in next(line for line in run.lines if "curl" in line)
    assert any(line.startswith("  proa complete") for line in run.lines) == (path == "/v1/completions")
    assert not any("proa chat" in line for line in run.lines)


@pytest.mark.parametrize("known", ["sk-secret", ""])
def test_the_example_carries_the_key_that_the_gateway_asks_for(known: str) -> None:
    run = Run(PROA_API_KEY="sk-secret", KNOWN_KEY=known)
    run.read_until("curl")
    run.close()
    assert "Bearer $PROA_API_KEY" in next(line for line in run.lines if "curl" in line)
    assert "sk-secret" not in "".join(run.lines)


def test_the_reason_of_a_failed_start_is_the_last_line() -> None:
    run = Run(engine="print('no such model'); raise SystemExit(3)")
    assert run.end() == 1
    run.close()
    assert run.lines[-1] == "proa serve: error: the engine exited with status 3: no such model"


def test_an_error_of_a_program_is_shown_once_as_the_reason() -> None:
    run = Run(engine="print('loading'); raise SystemExit('proa-engine: error: no such model')")
    assert run.end() == 1
    run.close()
    assert "engine  | loading" in run.lines
    assert run.lines[-1] == "proa serve: error: no such model"
    assert sum("no such model" in line for line in run.lines) == 1


def test_the_command_gets_the_key_of_the_gateway() -> None:
    run = Run("sh", "-c", "echo key $PROA_API_KEY", KNOWN_KEY="sk-1")
    assert run.end() == 0
    run.close()
    assert "command | key sk-1" in run.lines


def test_command_runs_when_ready_and_its_exit_stops_all() -> None:
    run = Run("sh", "-c", "echo done; exit 7")
    assert run.end() == 7
    run.close()
    assert [line for line in run.lines if line.startswith("command")] == ["command | done"]


def test_a_command_that_does_not_exist_is_the_reason() -> None:
    run = Run("/no/such/command")
    assert run.end() == 1
    run.close()
    assert run.lines[-1] == "proa serve: error: cannot run /no/such/command: No such file or directory"


def test_proxy_is_not_used_for_the_local_gateway() -> None:
    proxy = f"http://127.0.0.1:{free_port()}"  # nothing listens there
    run = Run("true", http_proxy=proxy, HTTP_PROXY=proxy, no_proxy="")
    assert run.end() == 0
    run.close()
    assert any(line.startswith("proa: ready after ") for line in run.lines)


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--port=8123"], "name a model behind `proa serve`: a folder, an id of the Hugging Face hub, or builtin"),
        (["builtin", "--tls-ca=/ca.pem"], "--tls-ca is not a flag of `proa serve`: the two programs talk over"),
        (["builtin", "--prot=8123"], "unknown flag --prot; did you mean --port?"),
        (
            ["builtin", "--host=203.0.113.1", "--port=8123"],
            "cannot listen on 203.0.113.1:8123: Cannot assign",
        ),
        (["builtin", "--max-num-seqs=0"], "max_num_seqs must be at least 1, got 0"),
    ],
)
def test_a_wrong_command_line_ends_before_anything_starts(words: list[str], reason: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "proa_cli", "serve", *words], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode != 0
    assert done.stderr.startswith(f"proa serve: error: {reason}")
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.parametrize(("host", "shown"), [("127.0.0.1", "127.0.0.1"), ("::1", "[::1]")])
def test_a_port_in_use_is_refused_before_anything_starts(host: str, shown: str) -> None:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as other:  # would say that it is ready
        try:
            other.bind((host, 0))
        except OSError:
            pytest.skip(f"this machine has no {host}")
        other.listen()
        port = other.getsockname()[1]
        command = [sys.executable, "-m", "proa_cli", "serve", "builtin", f"--host={host}", f"--port={port}"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert (
        done.stderr
        == f"proa serve: error: cannot listen on {shown}:{port}: Address already in use; choose another --port\n"
    )
