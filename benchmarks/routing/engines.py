"""Routing policies with real engines on a CPU: `PYTHONPATH=tests python -m benchmarks.routing.engines`.

Two engines with the built-in model; their caches together hold four fifths of the documents. Each policy has its own
gateway and its own documents.
"""

import argparse
import json
import random
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack

import httpx

from proa_gateway.routing.policies import POLICIES
from support.processes import engine_process, gateway_process

DOCUMENT, QUESTION = 1200, 40  # tokens
ENGINE = ("--model=builtin", "--num-gpu-blocks-override=360", "--max-num-batched-tokens=1024")


def ask(client: httpx.Client, prompt: list[int], session_id: str) -> tuple[float, int]:
    """Return the seconds to the first token, and the prompt's cached tokens."""
    body = {"prompt": prompt, "max_tokens": 4, "ignore_eos": True, "stream": True}
    body["stream_options"] = {"include_usage": True}
    started, first, cached = time.perf_counter(), 0.0, 0
    with client.stream("POST", "/v1/completions", json=body, headers={"x-session-id": session_id}) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                first = first or time.perf_counter() - started
                if usage := json.loads(line[6:]).get("usage"):
                    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return first, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=60, help="per policy; the first quarter is not counted")
    parser.add_argument("--documents", type=int, default=12)
    parser.add_argument("--clients", type=int, default=2)
    arguments = parser.parse_args()
    rng = random.Random(1)
    with ExitStack() as stack:
        engines = [engine_process(*ENGINE, env={"OMP_NUM_THREADS": "1"}) for _ in range(2)]
        with ThreadPoolExecutor() as starting:
            one, two = (address for _, address in starting.map(stack.enter_context, engines))
        for policy in POLICIES:
            documents = [[rng.randrange(100, 1000) for _ in range(DOCUMENT)] for _ in range(arguments.documents)]
            asks = []
            for _ in range(arguments.requests):
                question = [rng.randrange(100, 1000) for _ in range(QUESTION)]
                asks.append((rng.choice(documents) + question, f"user {rng.randrange(8)}"))
            with (
                gateway_process(one, "--engine", two, "--routing", policy) as (_, port),
                httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client,
                ThreadPoolExecutor(arguments.clients) as clients,
            ):
                time.sleep(2)  # until it has a session with both
                answers = list(clients.map(lambda one: ask(client, *one), asks))[arguments.requests // 4 :]
            hit = sum(cached for _, cached in answers) / (len(answers) * (DOCUMENT + QUESTION))
            times = sorted(1e3 * first for first, _ in answers)
            p90 = statistics.quantiles(times, n=10)[8]
            print(
                f"{policy:12} hit {hit:6.1%}  TTFT ms p50 {statistics.median(times):6.0f}  p90 {p90:6.0f}", flush=True
            )


if __name__ == "__main__":
    main()
