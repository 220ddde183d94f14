"""Soak test: two engines and a gateway under mixed traffic for half an hour, checking for memory and KV block leaks.

The traffic has streams, whole responses, several choices, log probabilities, long prompts, disconnects during a stream
and invalid requests. The KV cache is small, so that all of its pages are written to within minutes; with the default
size, resident memory would grow for an hour. Prints each process's private memory every minute. Exits with 1 if a
request failed, if KV blocks are in use at the end, or if a process grew by more than 5 % and 20 MiB from the second to
the last third of the run.

    PYTHONPATH=tests python -m benchmarks.http.soak --minutes 30 --clients 6
"""

import argparse
import json
import random
import statistics
import sys
import threading
import time
import urllib.request
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field

import psutil
from openai import APIStatusError, OpenAI

from support.processes import engine_process, gateway_process
from support.scrape import Scrape

_MODEL = "proa-builtin"
_ENGINE = ("--model=builtin", "--num-gpu-blocks-override=2048")
_SUBJECTS = ("France", "a lion", "Mars", "Tuesday", "bread", "the sea", "seven", "an oak")
_MIB = 1 << 20


@dataclass(slots=True)
class Tally:
    """Requests done, by kind, and errors."""

    done: Counter[str] = field(default_factory=Counter)
    errors: list[str] = field(default_factory=list)


class Client:
    """Sends requests of random kinds, one after the other, with pauses."""

    def __init__(self, url: str, seed: int, tally: Tally) -> None:
        self._openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=120)
        self._random = random.Random(seed)
        self._tally = tally
        self._kinds = (self.stream, self.whole, self.choices, self.logprobs, self.long_prompt, self.leave, self.bad)

    def run_until(self, deadline: float) -> None:
        while time.monotonic() < deadline:
            kind = self._random.choice(self._kinds)
            try:
                kind()
            except Exception as error:  # reported at the end; the run continues
                self._tally.errors.append(f"{kind.__name__}: {type(error).__name__}: {error}")
            self._tally.done[kind.__name__] += 1
            time.sleep(self._random.uniform(0, 0.2))

    def stream(self) -> None:
        text = "".join(
            chunk.choices[0].delta.content or "" for chunk in self._ask(stream=True, max_tokens=64) if chunk.choices
        )
        assert text, "an empty answer"

    def whole(self) -> None:
        assert self._ask(max_tokens=64).choices[0].message.content, "an empty answer"

    def choices(self) -> None:
        assert len(self._ask(n=3, max_tokens=32, temperature=0.8).choices) == 3

    def logprobs(self) -> None:
        assert self._ask(logprobs=True, top_logprobs=5, max_tokens=16).choices[0].logprobs is not None

    def long_prompt(self) -> None:
        self._ask(self._random.choice(_SUBJECTS) + " and the sea " * 200, max_tokens=8)

    def leave(self) -> None:
        stream = self._ask("Count from 1 to 50.", stream=True, max_tokens=1024, extra_body={"ignore_eos": True})
        for _ in zip(range(self._random.randint(1, 20)), stream, strict=False):
            pass
        stream.close()

    def bad(self) -> None:
        try:
            self._ask(temperature=-1)
        except APIStatusError as error:
            if error.status_code != 400:
                raise
        else:
            raise AssertionError("a bad request was taken")

    def _ask(self, text: str | None = None, **settings: object):  # type: ignore[no-untyped-def]
        question = text or f"Tell me about {self._random.choice(_SUBJECTS)}, number {self._random.randrange(10**6)}."
        messages = [{"role": "user", "content": question}]
        return self._openai.chat.completions.create(model=_MODEL, messages=messages, **settings)  # type: ignore[call-overload]


def scrape(port: int) -> Scrape:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        return Scrape(answer.read().decode())


def memory(process: psutil.Process) -> float:
    """Private resident memory in MiB. File pages are not counted: the kernel decides how many stay resident."""
    now = process.memory_info()
    return float(now.rss - now.shared) / _MIB


def watch(processes: dict[str, psutil.Process], deadline: float, tally: Tally) -> dict[str, list[float]]:
    """Private memory of each process in MiB, once a minute until the deadline."""
    history: dict[str, list[float]] = {name: [] for name in processes}
    print("| minute |", " | ".join(f"{name}, MiB" for name in processes), "| requests | errors |")
    print("|---:" * (len(processes) + 3) + "|", flush=True)
    minute = 0
    while (left := deadline - time.monotonic()) > 0:
        time.sleep(min(60.0, left))
        minute += 1
        for name, process in processes.items():
            history[name].append(memory(process))
        values = " | ".join(f"{history[name][-1]:.1f}" for name in processes)
        print(f"| {minute} | {values} | {sum(tally.done.values())} | {len(tally.errors)} |", flush=True)
    return history


def growth(history: list[float]) -> float:
    """Growth in MiB from the median of the second third to that of the last third. The first third is warm-up."""
    third = max(1, len(history) // 3)
    return statistics.median(history[-third:]) - statistics.median(history[third : 2 * third] or history)


def is_flat(history: list[float]) -> bool:
    grown = growth(history)
    return grown <= 20 or grown <= 0.05 * statistics.median(history)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--clients", type=int, default=6)
    arguments = parser.parse_args()
    tally = Tally()
    with ExitStack() as stack:
        engines = [stack.enter_context(engine_process(*_ENGINE)) for _ in range(2)]
        extra = [f"--engine={address}" for _, address in engines[1:]]
        gateway, port = stack.enter_context(gateway_process(engines[0][1], *extra))
        processes = {"gateway": psutil.Process(gateway.pid)}
        processes |= {f"engine {index}": psutil.Process(child.pid) for index, (child, _) in enumerate(engines)}
        deadline = time.monotonic() + 60 * arguments.minutes
        clients = [Client(f"http://127.0.0.1:{port}", seed, tally) for seed in range(arguments.clients)]
        threads = [threading.Thread(target=client.run_until, args=(deadline,)) for client in clients]
        for thread in threads:
            thread.start()
        history = watch(processes, deadline, tally)
        for thread in threads:
            thread.join()
        time.sleep(3)  # until the engines have reported their final statistics
        usage = scrape(port).value("vllm:kv_cache_usage_perc")
    grown = {name: round(growth(values), 1) for name, values in history.items()}
    print(json.dumps({"requests": tally.done, "errors": len(tally.errors), "growth_mib": grown, "kv_usage": usage}))
    print("\n".join(sorted(set(tally.errors))[:20]))
    return 0 if not tally.errors and usage == 0 and all(map(is_flat, history.values())) else 1


if __name__ == "__main__":
    sys.exit(main())
