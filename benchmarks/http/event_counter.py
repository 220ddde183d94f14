"""The client of `sse.py`: opens streams on raw sockets and counts their events without parsing them.

Prints `start` when it begins to count, then `end EVENTS SECONDS`.
"""

import argparse
import json
import selectors
import socket
import time

_EVENT = b"data: "
_PAUSE_SECONDS = 0.001  # so that the client reads many events at once and uses little CPU


class EventCounter:
    """Open streams, and the number of their events."""

    def __init__(self, port: int, streams: int) -> None:
        self.count = 0
        self._selector = selectors.DefaultSelector()
        self._tails: dict[int, bytes] = {}  # file descriptor -> last bytes, which may begin an event
        for _ in range(streams):
            connection = socket.create_connection(("127.0.0.1", port))
            connection.sendall(_request())
            self._selector.register(connection, selectors.EVENT_READ)
            self._tails[connection.fileno()] = b""

    def all_started(self) -> bool:
        return all(self._tails.values())

    def poll(self) -> None:
        for key, _ in self._selector.select(0.1):
            assert isinstance(key.fileobj, socket.socket)
            received = key.fileobj.recv(1 << 20)
            if not received:
                raise SystemExit("the server ended a stream")
            seen = self._tails[key.fd] + received
            self.count += seen.count(_EVENT)
            self._tails[key.fd] = seen[-len(_EVENT) + 1 :]
        time.sleep(_PAUSE_SECONDS)


def _request() -> bytes:
    body = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Go on."}],
        "stream": True,
        "max_tokens": 900_000,
        "temperature": 0,
    }
    data = json.dumps(body).encode()
    head = "POST /v1/chat/completions HTTP/1.1\r\nHost: gateway\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(data)}\r\n\r\n".encode() + data


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3.0, help="time for which events are counted")
    parser.add_argument("--warm-up", type=float, default=1.0, help="seconds before events are counted")
    arguments = parser.parse_args()
    counter = EventCounter(arguments.port, arguments.streams)
    while not counter.all_started():
        counter.poll()
    start = time.monotonic() + arguments.warm_up
    while time.monotonic() < start:
        counter.poll()
    counter.count, start = 0, time.monotonic()
    print("start", flush=True)
    while time.monotonic() < start + arguments.seconds:
        counter.poll()
    print(f"end {counter.count} {time.monotonic() - start}", flush=True)


if __name__ == "__main__":
    main()
