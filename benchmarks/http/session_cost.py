"""What `--session-admission` costs the gateway for prompts of no session: instructions of a request.

    PYTHONPATH=tests python -m benchmarks.http.session_cost --mode retain --tokens 512 8192

CPU times differ by tens of percent on a machine that does other work, and hide a cost of one percent; instructions do
not. Two gateways run under valgrind's callgrind, one with it and one without, and get the same prompts, each once. A
fake engine process echoes a few tokens. Under callgrind requests take 50 times as long, so what engines report is read
50 times as seldom.
"""

import argparse
import random
import re
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import httpx

from support.processes import fake_engine_process, free_port, http_status, process

WARM_UP = 20
SLOW_REPORTS = """
import proa_gateway.sessions.engine_sessions as sessions
from proa_gateway.cli import main
sessions._REPORT_SECONDS *= 50
main()
"""
_TOTALS = re.compile(r"^totals: (\d+)", re.MULTILINE)


class Gateway:
    """A gateway under callgrind."""

    def __init__(self, mode: str, engine: str, folder: Path, client: httpx.Client, stack: ExitStack) -> None:
        port = free_port()
        self._client, self._url = client, f"http://127.0.0.1:{port}/v1/completions"
        command = ["valgrind", "-q", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={folder}/%p"]
        command += [sys.executable, "-c", SLOW_REPORTS, "serve", "--engine", engine, "--host", "127.0.0.1"]
        command += ["--port", str(port), f"--session-admission={mode}"]
        started = process(command, is_ready=lambda: http_status(port, "/ready") == 200, seconds=900)
        self._pid = stack.enter_context(started).pid
        self._folder, self._num_dumps = folder, 0

    def warm_up(self, tokens: int) -> None:
        self._send([[number] * tokens for number in range(3, 3 + WARM_UP)])
        self._control("--instr=on")
        self._send([[number] * tokens for number in range(30, 34)])

    def measure(self, prompts: list[list[int]]) -> float:
        """Instructions a request."""
        self._count()
        self._send(prompts)
        return self._count() / len(prompts)

    def _send(self, prompts: list[list[int]]) -> None:
        for prompt in prompts:
            body = {"prompt": prompt, "max_tokens": 16, "ignore_eos": True}
            self._client.post(self._url, json=body).raise_for_status()

    def _count(self) -> int:
        """Instructions since it was called last."""
        self._control("--dump")
        self._num_dumps += 1
        dump = self._folder / f"{self._pid}.{self._num_dumps}"
        while not (dump.exists() and (totals := _TOTALS.search(dump.read_text()))):
            time.sleep(0.1)
        dump.unlink()
        return int(totals[1])

    def _control(self, action: str) -> None:
        subprocess.run(["callgrind_control", action, str(self._pid)], check=True, capture_output=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mode", choices=["retain", "wait"], default="wait", help="of the gateway compared with off")
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192], help="of a prompt")
    parser.add_argument("--requests", type=int, default=20, help="of a round")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    draw = random.Random(0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        client = stack.enter_context(httpx.Client(timeout=600))
        _, engine = stack.enter_context(fake_engine_process())
        off, on = (Gateway(mode, engine, folder, client, stack) for mode in ("off", arguments.mode))
        for gateway in (off, on):
            gateway.warm_up(max(arguments.tokens))
        for tokens in arguments.tokens:
            for number in range(arguments.rounds):
                prompts = [[draw.randrange(3, 250) for _ in range(tokens)] for _ in range(arguments.requests)]
                pair = (off, on) if number % 2 else (on, off)
                measured = {gateway: gateway.measure(prompts) for gateway in pair}
                before, after = measured[off], measured[on]
                print(
                    f"{tokens} tokens: {before:,.0f} and {after:,.0f} instructions, ratio {after / before:.4f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
