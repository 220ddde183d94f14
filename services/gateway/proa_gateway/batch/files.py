"""The files of a batch: its lines with requests, and the file with the responses."""

import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import orjson


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """`url`: the path of the endpoint."""

    custom_id: str  # unique in the input file
    url: str
    body: dict[str, Any]


@dataclass(frozen=True, slots=True)
class BatchResponse:
    """`request_id`: from the response's header."""

    status: int
    request_id: str
    body: Any  # JSON, or text if it is none


@dataclass(frozen=True, slots=True)
class LineError:
    """Why a line of the input, counted from 1, is not sent. `custom_id`: None if the line has none."""

    line: int
    code: str  # stable, for programs
    message: str
    custom_id: str | None = None


@dataclass(slots=True)
class Answered:
    """What the output file has: requests by their `custom_id`, and lines of the input that were not sent."""

    custom_ids: set[str] = field(default_factory=set)  # of requests with a response
    lines: set[int] = field(default_factory=set)  # numbers, from 1
    num_failed: int = 0  # without status 200, or not sent

    def add(self, output: bytes) -> None:
        """Raises `ValueError` for a line that no batch wrote."""
        value = orjson.loads(output)
        if not isinstance(value, dict) or not {"custom_id", "response", "error"} <= value.keys():
            raise ValueError("the line is not a batch's output")
        response, error = value["response"], value["error"]
        if response is None:
            self.lines.add(error["line"])
        else:
            self.custom_ids.add(value["custom_id"])
        self.num_failed += response is None or response["status_code"] != 200


def read_requests(lines: Iterable[bytes]) -> Iterator[BatchRequest | LineError]:
    """The requests of an input file, in order. Empty lines are left out."""
    seen: set[str] = set()
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        request = parse_request(number, line)
        if isinstance(request, BatchRequest):
            if request.custom_id in seen:
                message = f"An earlier line has the custom_id {request.custom_id!r} too."
                request = LineError(number, "duplicate_custom_id", message, request.custom_id)
            else:
                seen.add(request.custom_id)
        yield request


def parse_request(number: int, line: bytes) -> BatchRequest | LineError:
    try:
        value = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        return LineError(number, "invalid_json", f"The line is not valid JSON: {error}")
    if not isinstance(value, dict):
        return LineError(number, "invalid_request", "The line is not a JSON object.")
    custom_id, url, body = (value.get(name) for name in ("custom_id", "url", "body"))
    if not isinstance(custom_id, str) or not custom_id:
        return LineError(number, "invalid_custom_id", "custom_id must be a string that is not empty.")
    if value.get("method") != "POST":
        return LineError(number, "invalid_method", "method must be POST.", custom_id)
    if not isinstance(url, str) or not url.startswith("/") or url.startswith("//"):
        message = "url must be the path of an endpoint, such as /v1/chat/completions."
        return LineError(number, "invalid_url", message, custom_id)
    if not isinstance(body, dict):
        return LineError(number, "invalid_body", "body must be an object.", custom_id)
    if body.get("stream"):
        return LineError(number, "invalid_body", "body.stream: responses of a batch are not streamed.", custom_id)
    return BatchRequest(custom_id, url, body)


def response_line(request: BatchRequest, response: BatchResponse) -> bytes:
    fields = {"status_code": response.status, "request_id": response.request_id, "body": response.body}
    return _line(request.custom_id, fields, None)


def error_line(error: LineError) -> bytes:
    fields = {"code": error.code, "message": error.message, "line": error.line}
    return _line(error.custom_id, None, fields)


def num_output_tokens(body: Any) -> int:
    """The output tokens of a response, by the names of the APIs that count them; 0 if none does."""
    usage = body.get("usage") or body.get("meta_info") if isinstance(body, dict) else None
    if not isinstance(usage, dict):
        return 0
    count = usage.get("completion_tokens", usage.get("output_tokens"))
    return count if isinstance(count, int) else 0


def _line(custom_id: str | None, response: dict[str, Any] | None, error: dict[str, Any] | None) -> bytes:
    id = f"batch_req_{secrets.token_hex(12)}"
    value = {"id": id, "custom_id": custom_id, "response": response, "error": error}
    return orjson.dumps(value, option=orjson.OPT_APPEND_NEWLINE)


@contextmanager
def open_output(path: Path) -> Iterator[tuple[BinaryIO, Answered]]:
    """The file, for lines to append, and what it has. A last line that was cut off is removed. Raises `ValueError` if
    the file is not the output of a batch."""
    if not path.is_file():  # new, or no file but a pipe
        with path.open("wb") as file:
            yield file, Answered()
        return
    with path.open("rb+") as file:
        answered = Answered()
        os.truncate(path, _read(path, answered))
        file.seek(0, os.SEEK_END)
        yield file, answered


def _read(path: Path, answered: Answered) -> int:
    """Add all whole lines. Return their size in bytes."""
    size = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                break
            try:
                answered.add(line)
            except (ValueError, LookupError, TypeError):
                raise ValueError(f"{path}: line {number} is not the output of a batch") from None
            size += len(line)
    return size
