"""The gateway's HTTP API on this machine, as `proa` uses it."""

import json
import os
import urllib.request
from typing import Any

CHAT = {"messages": [{"role": "user", "content": "Hello!"}]}
# Requests of which the first that the model answers is shown: path, body, what is added to generate a stream.
EXAMPLES: tuple[tuple[str, dict[str, Any], dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT, {"stream": True}),
    ("/v1/completions", {"prompt": "Once upon a time"}, {"stream": True}),
    ("/v1/embeddings", {"input": "Hello!"}, {}),
    ("/v1/rerank", {"query": "What is blue?", "documents": ["The sky.", "Grass."]}, {}),
    ("/classify", {"input": "Hello!"}, {}),
    ("/pooling", {"input": "Hello!"}, {}),
)


class Gateway:
    """Asks without the environment's proxies, which may not reach this machine."""

    def __init__(self, url: str) -> None:
        self.url = url
        self.key = os.environ.get("PROA_API_KEY", "")
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))

    def is_ready(self) -> bool:
        try:
            self._open("/ready", timeout=1)
            return True
        except OSError:
            return False

    def example(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the first of `EXAMPLES` that the model answers; of a chat if it answers none in time."""
        model = str(json.loads(self._open("/v1/models", timeout=5))["data"][0]["id"])
        for path, fields, streamed in EXAMPLES:
            body = {"model": model, **fields}
            if self._answers(path, body | ({"max_tokens": 1} if streamed else {})):
                return path, body | streamed
        path, fields, streamed = EXAMPLES[0]
        return path, {"model": model, **fields, **streamed}

    def _answers(self, path: str, body: dict[str, Any]) -> bool:
        """Whether a POST has status 200."""
        try:
            self._open(path, json.dumps(body).encode(), timeout=20)
            return True
        except OSError:
            return False

    def _open(self, path: str, data: bytes | None = None, *, timeout: float) -> bytes:
        headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {self.key}"} if self.key else {})
        with self._opener.open(urllib.request.Request(self.url + path, data, headers), timeout=timeout) as response:
            answer: bytes = response.read()
            return answer
