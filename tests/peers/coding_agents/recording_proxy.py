"""A proxy that records an agent's requests and what Proa says to them."""

import http.client
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

_HOP_BY_HOP = {"connection", "transfer-encoding", "keep-alive", "host", "accept-encoding"}


GIVEN_UP = 499


@dataclass(frozen=True, slots=True)
class Exchange:
    """`status`: `GIVEN_UP` if the agent closed the connection. `answer`: the response's body, events included."""

    method: str
    path: str
    body: Any
    status: int
    ignored: str
    warnings: str
    answer: str

    @property
    def is_turn(self) -> bool:
        """Whether the request is one of the agent itself, which has tools."""
        if self.status != 200 or not isinstance(self.body, dict):
            return False
        items = self.body.get("input", ())
        return bool(self.body.get("tools")) or any(item.get("type") == "additional_tools" for item in items)

    @property
    def num_tokens(self) -> int:
        """Of the prompt. Anthropic's `input_tokens` are those that were not cached."""
        is_messages = "/messages" in self.path
        return self._usage("input_tokens", "prompt_tokens") + (self.num_cached_tokens if is_messages else 0)

    @property
    def num_cached_tokens(self) -> int:
        return self._usage("cached_tokens", "cache_read_input_tokens")

    def _usage(self, *names: str) -> int:
        found = re.findall(rf'"(?:{"|".join(names)})": ?(\d+)', self.answer)
        return max(map(int, found), default=0)


@contextmanager
def recording_proxy(url: str) -> Iterator[tuple[str, list[Exchange]]]:
    """Return the proxy's own URL, and a list that grows."""
    exchanges: list[Exchange] = []
    target = urlsplit(url).netloc

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("content-length", 0)))
            sent = {name: value for name, value in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            connection = http.client.HTTPConnection(target)
            connection.request(self.command, self.path, body, sent)
            response = connection.getresponse()
            status, answer = response.status, b""
            try:
                self.send_response(status)
                for name, value in response.getheaders():
                    if name.lower() not in _HOP_BY_HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.end_headers()
                while part := response.read1(65_536):
                    answer += part
                    self.wfile.write(part)
                    self.wfile.flush()
            except ConnectionError:
                status = GIVEN_UP
            self.close_connection = True
            connection.close()
            names = ("x-proa-ignored-fields", "x-proa-warnings")
            ignored, warnings = (", ".join(response.headers.get_all(name) or ()) for name in names)
            parsed = json.loads(body) if body else None
            text = answer.decode(errors="replace")
            exchanges.append(Exchange(self.command, self.path, parsed, status, ignored, warnings, text))

        do_GET = do_HEAD = do_POST

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}", exchanges
    finally:
        server.shutdown()
        server.server_close()
