"""Images over HTTP on a CPU: what a new image costs in the gateway and in the engine, and what a repeated one costs.

    PYTHONPATH=tests python -m benchmarks.http.images --requests 96 --clients 8

A closed loop of clients sends chats with one JPEG image and a short answer: first without images, then with an image of
its own for each request, then with a few images in front of the same text (found in the KV cache), and behind another
text each time (found among the encoded images). The model is small, with random weights, in an engine process behind a
gateway process. Prints requests a second, and from the metrics of both: milliseconds of the gateway for an image,
images encoded, and the share of prompt tokens that were cached.
"""

import argparse
import base64
import json
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from http.client import HTTPConnection
from pathlib import Path
from typing import Any
from urllib.request import urlopen

from support.image_files import encoded, random_image
from support.image_models import make_image_model
from support.processes import engine_process, free_port, gateway_process
from support.scrape import Scrape

NUM_REPEATED = 4  # different images of the workloads that repeat them
COUNTERS = {
    "prepared": "proa_gateway_image_seconds_count",
    "seconds": "proa_gateway_image_seconds_sum",
    "encoded": "proa_engine_encoded_images_total",
    "found encoded": "proa_engine_encoder_cache_hits_total",
    "cached tokens": "vllm:prefix_cache_hits_total",
    "prompt tokens": "vllm:prefix_cache_queries_total",
}
Content = str | list[dict[str, Any]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=96)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--size", default="640x480", help="of an image, in pixels")
    parser.add_argument("--max-tokens", type=int, default=8)
    arguments = parser.parse_args()
    width, height = map(int, arguments.size.split("x"))
    with ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        folder = make_image_model(scratch, "qwen3_vl", patch=16, side=4096)
        port = free_port()
        flags = ("--model", str(folder), "--metrics-port", str(port), "--kv-cache-memory-bytes", str(2**28))
        _, address = stack.enter_context(engine_process(*flags, env={"OMP_NUM_THREADS": "1"}))
        _, gateway = stack.enter_context(gateway_process(address))
        print(f"{arguments.requests} requests, {arguments.clients} clients, images of {width} x {height} pixels")
        for name, contents in workloads(arguments.clients + arguments.requests, width, height).items():
            bodies = [body(content, arguments.max_tokens) for content in contents]
            run(gateway, bodies[: arguments.clients], arguments.clients)  # warm up
            before = counters((gateway, port))
            seconds = run(gateway, bodies[arguments.clients :], arguments.clients)
            spent = {key: value - before[key] for key, value in counters((gateway, port)).items()}
            print(line(name, arguments.requests, seconds, spent), flush=True)


def workloads(count: int, width: int, height: int) -> dict[str, list[Content]]:
    """Contents of the messages."""
    repeated = [image_part(width, height, seed) for seed in range(NUM_REPEATED)]
    return {
        "no image": [f"Number {index}: what is it?" for index in range(count)],
        "new images": [[image_part(width, height, 100 + index), text_part("?")] for index in range(count)],
        "the same prompts": [[repeated[index % NUM_REPEATED], text_part("?")] for index in range(count)],
        "the same images": [[text_part(f"{index}?"), repeated[index % NUM_REPEATED]] for index in range(count)],
    }


def text_part(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def image_part(width: int, height: int, seed: int) -> dict[str, Any]:
    """A JPEG file of about the size of a photograph's."""
    image = random_image("RGB", width // 10, height // 10, seed).resize((width, height))
    data = base64.b64encode(encoded(image, "JPEG")).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}}


def body(content: Content, max_tokens: int) -> bytes:
    messages = [{"role": "user", "content": content}]
    return json.dumps({"messages": messages, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True}).encode()


def run(port: int, bodies: Sequence[bytes], num_clients: int) -> float:
    """Send all, by clients that each wait for their answers. Returns the seconds."""
    waiting, lock = iter(bodies), threading.Lock()

    def client(_: int) -> None:
        connection = HTTPConnection("127.0.0.1", port, timeout=120)
        while True:
            with lock:
                data = next(waiting, None)
            if data is None:
                return connection.close()
            connection.request("POST", "/v1/chat/completions", data, {"content-type": "application/json"})
            response = connection.getresponse()
            answer = response.read()
            assert response.status == 200, answer

    started = time.perf_counter()
    with ThreadPoolExecutor(num_clients) as executor:
        list(executor.map(client, range(num_clients)))
    return time.perf_counter() - started


def counters(ports: Sequence[int]) -> dict[str, float]:
    """The sums of `COUNTERS` over gateway and engine."""
    pages = []
    for port in ports:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
            pages.append(Scrape(page.read().decode()))
    return {key: sum(page.value(name) for page in pages if name in page.names) for key, name in COUNTERS.items()}


def line(name: str, requests: int, seconds: float, spent: dict[str, float]) -> str:
    gateway = spent["seconds"] / max(spent["prepared"], 1) * 1e3
    cached = spent["cached tokens"] / max(spent["prompt tokens"], 1)
    return (
        f"{name:17} {requests / seconds:6.1f} requests/s, {gateway:5.1f} ms an image in the gateway, "
        f"{spent['encoded']:3.0f} images encoded, {spent['found encoded']:3.0f} found encoded, "
        f"{cached:4.0%} of the prompt tokens cached"
    )


if __name__ == "__main__":
    main()
