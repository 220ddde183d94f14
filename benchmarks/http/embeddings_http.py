"""What a response of embeddings costs the gateway, by its format: CPU time for a request.

    PYTHONPATH=tests python -m benchmarks.http.embeddings_http --inputs 64 --dimensions 1024

A fake engine process computes the values, in Python, so only the gateway's own CPU time says something.
"""

import argparse
from statistics import median

import httpx
import psutil

from support.processes import fake_engine_process, gateway_process

TASK = ("--pooling-tasks", "POOLING_TASK_EMBED")
FORMATS = {"one dimension": "float", "base64": "base64", "float": "float"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inputs", type=int, default=64)
    parser.add_argument("--dimensions", type=int, default=1024)
    parser.add_argument("--tokens", type=int, default=32, help="of an input")
    parser.add_argument("--rounds", type=int, default=15)
    measure_requests(parser.parse_args())


def measure_requests(arguments: argparse.Namespace) -> None:
    inputs = [[1 + index % 300] * arguments.tokens for index in range(arguments.inputs)]
    used: dict[str, list[float]] = {name: [] for name in FORMATS}
    engine_arguments = (*TASK, "--embedding-size", str(arguments.dimensions))
    with fake_engine_process(*engine_arguments) as (_, address), gateway_process(address) as (process, port):
        gateway = psutil.Process(process.pid)
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60) as client:
            for number in range(arguments.rounds + 1):
                for name, encoding_format in FORMATS.items():
                    dimensions = 1 if name == "one dimension" else arguments.dimensions
                    body = {"input": inputs, "encoding_format": encoding_format, "dimensions": dimensions}
                    before = cpu_seconds(gateway)
                    response = client.post("/v1/embeddings", json=body).raise_for_status()
                    if number:  # the first round warms up
                        used[name].append(1000 * (cpu_seconds(gateway) - before))
                    if number == arguments.rounds:
                        size = len(response.content) / 1000
                        print(f"{name:14} gateway CPU {median(used[name]):5.1f} ms, response {size:7.1f} kB")


def cpu_seconds(process: psutil.Process) -> float:
    """From the scheduler, in nanoseconds: `cpu_times` counts in hundredths of a second."""
    total = 0
    for thread in process.threads():
        with open(f"/proc/{process.pid}/task/{thread.id}/schedstat") as file:
            total += int(file.read().split()[0])
    return total / 1e9


if __name__ == "__main__":
    main()
