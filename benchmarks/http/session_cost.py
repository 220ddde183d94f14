"""What `--session-admission wait` costs the gateway for prompts of no session: CPU time for a request.

    PYTHONPATH=tests python -m benchmarks.http.session_cost --tokens 512 8192

Two gateways, one with it and one without, take turns with the same prompts, each of which is sent to either once. A
fake engine process echoes a few tokens, so only the gateways' own CPU time says something. Prints the median of the
rounds for each, and that of their ratios with its quartiles; with `--json` the rounds too.
"""

import argparse
import json
import random
import statistics

import httpx
import psutil

from benchmarks.http.embeddings_http import cpu_seconds
from support.processes import fake_engine_process, gateway_process

MODES = ("off", "wait")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", default=[512, 8192], help="of a prompt")
    parser.add_argument("--output-len", type=int, default=16)
    parser.add_argument("--requests", type=int, default=50, help="of a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    for tokens in arguments.tokens:
        used = measure(tokens, arguments)
        ratios = [wait / off for off, wait in zip(used["off"], used["wait"], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        medians = ", ".join(f"{mode} {statistics.median(used[mode]):.3f} ms" for mode in MODES)
        print(f"{tokens} tokens: {medians}, ratio {middle:.3f} ({low:.3f} to {high:.3f})", flush=True)
        if arguments.json:
            print(json.dumps({"tokens": tokens, "milliseconds": used}), flush=True)


def measure(tokens: int, arguments: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of CPU time a request, for each round by mode."""
    draw = random.Random(tokens)
    used: dict[str, list[float]] = {mode: [] for mode in MODES}
    with (
        fake_engine_process() as (_, address),
        gateway_process(address, f"--session-admission={MODES[0]}") as (first, first_port),
        gateway_process(address, f"--session-admission={MODES[1]}") as (second, second_port),
        httpx.Client(timeout=60) as client,
    ):
        gateways = {
            MODES[0]: (psutil.Process(first.pid), first_port),
            MODES[1]: (psutil.Process(second.pid), second_port),
        }
        for number in range(arguments.rounds + 1):
            prompts = [[draw.randrange(3, 250) for _ in range(tokens)] for _ in range(arguments.requests)]
            for mode in MODES if number % 2 else reversed(MODES):
                gateway, port = gateways[mode]
                before = cpu_seconds(gateway)
                for prompt in prompts:
                    body = {"prompt": prompt, "max_tokens": arguments.output_len, "ignore_eos": True}
                    client.post(f"http://127.0.0.1:{port}/v1/completions", json=body).raise_for_status()
                if number:  # the first round warms up
                    used[mode].append(1000 * (cpu_seconds(gateway) - before) / arguments.requests)
    return used


if __name__ == "__main__":
    main()
