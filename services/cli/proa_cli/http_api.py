"""An OpenAI-compatible API over HTTP, as `proa` uses it: requests that block, and streams of events."""

import argparse
import http.client
import json
import os
import secrets
import urllib.error
import urllib.request
from collections.abc import Generator, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from proa.addresses import is_loopback_url

TIMEOUT = 600.0  # seconds without a byte of an answer
_LIST_TIMEOUT = 10.0  # of the list of models, which a server has at once


class ApiError(Exception):
    """A request failed. The message is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class Form:
    """A body as `multipart/form-data`."""

    content_type: str
    data: bytes

    @classmethod
    def of(cls, fields: Iterable[tuple[str, str]], file: bytes) -> "Form":
        """`fields`: names and values; a name may be there several times. `file`: the content of the field `file`."""
        boundary = secrets.token_hex(16)
        head = f'--{boundary}\r\nContent-Disposition: form-data; name="'
        parts = [f'{head}{name}"\r\n\r\n{value}\r\n'.encode() for name, value in fields]
        parts += [f'{head}file"; filename="audio"\r\n\r\n'.encode(), file, f"\r\n--{boundary}--\r\n".encode()]
        return cls(f"multipart/form-data; boundary={boundary}", b"".join(parts))


Body = Mapping[str, Any] | Form | None
"""Of a request: JSON, a form, or none."""


def add_server_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that `connect` reads."""
    parser.add_argument("--url", default="http://localhost:8000/v1", help="URL of the server's API")
    parser.add_argument(
        "--api-key", metavar="KEY", help="API key (default: the variable PROA_API_KEY, or OPENAI_API_KEY)"
    )


def connect(arguments: argparse.Namespace) -> "HttpApi":
    """The API that a command's arguments name. Raises `ValueError`."""
    key = arguments.api_key or os.environ.get("PROA_API_KEY") or os.environ.get("OPENAI_API_KEY") or ""
    return HttpApi(arguments.url, key)


class HttpApi:
    """Paths are added to `url`. This machine is asked without the environment's proxies, which may not reach it."""

    def __init__(self, url: str, key: str = "") -> None:
        """Raises `ValueError`."""
        if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
            raise ValueError(f"{url!r} is not a URL that begins with http:// or https://")
        if not key.isascii() or not key.isprintable():
            raise ValueError("the API key has characters other than printable ASCII, such as the end of a line")
        self.url = url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        proxies = [urllib.request.ProxyHandler({})] if is_loopback_url(url) else []
        self._opener = urllib.request.build_opener(*proxies)

    def open(self, path: str, body: Body = None, *, timeout: float) -> http.client.HTTPResponse:
        """Send a GET, or a POST of `body`. Raises `OSError`, of which `HTTPError` for a status that is an error."""
        content_type = body.content_type if isinstance(body, Form) else "application/json"
        headers = {**self._headers, "Content-Type": content_type}
        data = body.data if isinstance(body, Form) else None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, headers)
        response: http.client.HTTPResponse = self._opener.open(request, timeout=timeout)
        return response

    def models(self, task: str | None = None) -> list[str]:
        """The names of the models that say they have this task; of all for None. Raises `ApiError`."""
        with self._asked("/models", None, _LIST_TIMEOUT) as response:
            try:
                models = json.load(response)["data"]
                return [str(model["id"]) for model in models if task is None or model.get("task") == task]
            except (ValueError, LookupError, TypeError):
                raise ApiError(f"{self.url}/models is not a list of models; does the URL lack /v1?") from None

    def text(self, path: str, body: Body) -> str:
        """The text of an answer that is no JSON. Raises `ApiError`."""
        with self._asked(path, body, TIMEOUT) as response:
            try:
                return response.read().decode()
            except (OSError, http.client.HTTPException) as error:
                raise ApiError(f"the connection to {self.url} broke off: {error or type(error).__name__}") from None

    def stream(self, path: str, body: Body) -> Generator[dict[str, Any]]:
        """Yield the JSON objects of the events that a request for a stream is answered with. Raises `ApiError`, also
        for an error event, and for a stream that ends without `[DONE]`."""
        with self._asked(path, body, TIMEOUT) as response:
            try:
                for line in response:
                    name, _, data = line.strip().partition(b":")
                    if name != b"data":
                        continue
                    if data.strip() == b"[DONE]":
                        return
                    event = json.loads(data)
                    if message := _message(event):
                        raise ApiError(message)
                    yield event
            except (OSError, http.client.HTTPException) as error:
                raise ApiError(f"the connection to {self.url} broke off: {error or type(error).__name__}") from None
            except ValueError:
                raise ApiError(f"{self.url}{path} does not answer with events in JSON") from None
        raise ApiError(f"the connection to {self.url} broke off before the end of the answer")

    def _asked(self, path: str, body: Body, timeout: float) -> http.client.HTTPResponse:
        try:
            return self.open(path, body, timeout=timeout)
        except urllib.error.HTTPError as error:
            raise ApiError(_reason(error, path)) from None
        except (OSError, http.client.HTTPException) as error:
            cause = error.reason if isinstance(error, urllib.error.URLError) else error
            reason = cause.strerror if isinstance(cause, OSError) and cause.strerror else cause
            raise ApiError(f"cannot reach {self.url}: {reason or type(error).__name__}") from None


def _reason(error: urllib.error.HTTPError, path: str) -> str:
    """The server's own message, in one line, and what is probably wrong."""
    with error:
        try:
            message = _message(json.loads(error.read()))
        except (OSError, ValueError, http.client.HTTPException):
            message = ""
    hint = ""
    if error.code == 401:
        hint = "; give the key with --api-key or PROA_API_KEY"
    elif (error.code, path) == (404, "/models"):
        hint = "; does the URL end with /v1?"
    return f"{message or error.reason} (status {error.code}{hint})"


def _message(body: Any) -> str:
    """The message of an error object, empty if it has none."""
    error = body.get("error") if isinstance(body, dict) else None
    message = error.get("message") if isinstance(error, dict) else error
    return " ".join(message.split()) if isinstance(message, str) else ""
