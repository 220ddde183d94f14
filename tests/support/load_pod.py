"""Streaming clients, run as a pod to reach the Service like any other pod. Standard library only.

Each client sends chat requests one after another until it has sent `--requests` or `--stop-file` exists. Each request
is printed as a line of JSON: the question, the text, the outcome, its start and end (Unix seconds), and the longest
time between two events of its stream.
"""

import argparse
import http.client
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

QUESTIONS = (
    "What is the capital of France?",
    "What is 3 plus 4?",
    "Tell me about a small boat on the sea.",
    "Who are you?",
    "Count from 1 to 40.",
)

Record = dict[str, Any]


def ask(host: str, port: int, body: Record, timeout: float, key: str, sent: Callable[[], object]) -> Record:
    """Send one streaming request; return its record. `error` is empty for success. Calls `sent` before reading."""
    record: Record = {"began": time.time(), "text": "", "events": 0, "silence": 0.0, "finish_reason": None, "error": ""}
    connection = http.client.HTTPConnection(host, port, timeout=timeout)
    try:
        headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
        try:
            connection.request("POST", "/v1/chat/completions", json.dumps(body | {"stream": True}), headers)
        finally:
            sent()
        response = connection.getresponse()
        if response.status != 200:
            raise OSError(f"status {response.status}: {response.read(300).decode(errors='replace')}")
        read_events(response, record)
    except (OSError, http.client.HTTPException, ValueError) as error:
        record["error"] = f"{type(error).__name__}: {error}"
    finally:
        connection.close()
    return record | {"ended": time.time()}


def read_events(response: http.client.HTTPResponse, record: Record) -> None:
    """Read until [DONE]. Raises ValueError for an error event or if the stream ends before [DONE]."""
    previous = time.monotonic()
    for line in response:
        if not line.startswith(b"data: "):
            continue
        now = time.monotonic()
        record["silence"], previous = max(record["silence"], now - previous), now
        if line.strip() == b"data: [DONE]":
            return
        event = json.loads(line[6:])
        if "error" in event:
            raise ValueError(json.dumps(event["error"]))
        record["events"] += 1
        for choice in event["choices"]:
            record["text"] += choice["delta"].get("content") or ""
            record["finish_reason"] = choice["finish_reason"] or record["finish_reason"]
    raise ValueError("the stream ended before [DONE]")


def price_list(client: int, index: int, items: int) -> list[str]:
    """Lines that differ from their beginning on, so that no two requests share blocks of the prefix cache."""
    return [f"Item {item} of list {client}.{index} costs {item * 7 % 50} coins. " for item in range(items)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=80)
    parser.add_argument("--model", default="proa-builtin")
    parser.add_argument("--clients", type=int, default=4)
    parser.add_argument("--requests", type=int, default=1_000_000, help="requests of each client")
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--question", help="default: several questions in turn")
    parser.add_argument("--items", type=int, default=0, help="lines before each question, other ones in each request")
    parser.add_argument("--temperature", type=float, default=0.0, help="of every second client; the others use 0")
    parser.add_argument("--ignore-eos", action="store_true", help="tokens after the end token may have no text")
    parser.add_argument("--timeout", type=float, default=60.0, help="socket timeout in seconds")
    parser.add_argument("--seconds", type=float, default=600.0, help="no request starts later than this")
    parser.add_argument("--stop-file", type=Path, default=Path("/tmp/stop"))
    parser.add_argument("--key", default="none")
    arguments = parser.parse_args()
    printing = threading.Lock()
    # Read no response before all first requests are sent: a thousand reading threads delay those still connecting.
    all_sent = threading.Barrier(arguments.clients)
    deadline = time.monotonic() + arguments.seconds

    def client(number: int) -> None:
        for index in range(arguments.requests):
            if index and (arguments.stop_file.exists() or time.monotonic() > deadline):
                return
            question = arguments.question or QUESTIONS[(number + index) % len(QUESTIONS)]
            question = "".join([*price_list(number, index, arguments.items), question])
            body = {
                "model": arguments.model,
                "messages": [{"role": "user", "content": question}],
                "max_tokens": arguments.max_tokens,
                "temperature": arguments.temperature if number % 2 else 0.0,
                "seed": number,
                "ignore_eos": arguments.ignore_eos,
            }
            sent = all_sent.wait if index == 0 else lambda: None
            record = ask(arguments.host, arguments.port, body, arguments.timeout, arguments.key, sent)
            with printing:
                print(json.dumps(record | {"client": number, "index": index, "question": question}), flush=True)

    threads = [threading.Thread(target=client, args=(number,)) for number in range(arguments.clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main()
