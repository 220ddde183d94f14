"""The gateway of `proa serve`: whether it is ready, and a request that its model answers."""

import http.client
from typing import Any

from proa_cli.http_api import HttpApi

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
    """`url`: without /v1. `model`: its name in the API. `key`: one that the gateway takes, empty if none is known."""

    def __init__(self, url: str, model: str, key: str = "") -> None:
        self.url = url
        self._model = model
        self.key = key
        self._api = HttpApi(url, key)

    def is_ready(self) -> bool:
        return self._answers("/ready", timeout=1)

    def needs_key(self) -> bool:
        return bool(self.key) or not self._answers("/v1/models", timeout=5)

    def example(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the first of `EXAMPLES` that the model answers; of a chat if it answers none in time, or
        only with a key that is not known here."""
        for path, fields, streamed in EXAMPLES:
            body = {"model": self._model, **fields}
            if self._answers(path, body | ({"max_tokens": 1} if streamed else {}), timeout=20):
                return path, body | streamed
        path, fields, streamed = EXAMPLES[0]
        return path, {"model": self._model, **fields, **streamed}

    def _answers(self, path: str, body: dict[str, Any] | None = None, *, timeout: float) -> bool:
        """Whether a request has status 200."""
        try:
            with self._api.open(path, body, timeout=timeout) as response:
                response.read()
            return True
        except (OSError, http.client.HTTPException):
            return False
