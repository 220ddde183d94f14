"""The logs of Proa's programs: lines of text or of JSON on standard error.

A program calls `configure` once. Its modules log with `logging.getLogger(__name__)`, and give what a log collector may
search for as fields: `_log.info("engine connected: %s", address, extra=with_fields(engine=address))`. They are members
of lines of JSON; lines of text have the message alone. Messages that are logged while a request is served have its
`request_id` and `trace_id`, in both formats, see `request_state`.

Warnings of Python and uncaught exceptions, of threads too, are logged like messages. Loggers of other packages log
warnings and errors; with the level debug also messages of the level info.
"""

import json
import logging
import os
import sys
import threading
import warnings
from argparse import Namespace
from collections.abc import Mapping
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal, Self, TextIO

from proa.options import check_options, from_arguments, option

Level = Literal["debug", "info", "warning", "error"]
Format = Literal["text", "json"]

request_state: ContextVar[Mapping[str, Any]] = ContextVar("request_state")
"""The state of the request that is served in this context. Its `request_id` and `trace_id` are logged."""
_OWN = ("proa", "proa_cli", "proa_engine", "proa_gateway")  # names of loggers, with those below them
_OF_REQUEST = ("request_id", "trace_id")
_LEVEL_VARIABLE, _FORMAT_VARIABLE = "PROA_LOG_LEVEL", "PROA_LOG_FORMAT"


@dataclass(frozen=True, slots=True, kw_only=True)
class LogOptions:
    log_level: Level = option("info", "least severe level of the messages to log")
    log_format: Format = option("text", "log lines of text, or of JSON for log collectors")

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def from_environment(cls) -> Self:
        """The options of the program that started this process. Raises `ValueError`."""
        return from_arguments(cls, Namespace(), os.environ)

    def arguments(self) -> list[str]:
        return [f"--log-level={self.log_level}", f"--log-format={self.log_format}"]


def configure(options: LogOptions, program: str, *, rank: int | None = None) -> None:
    """Log as `options` say, and so do programs that this process starts later, which get them by the environment. Call
    it before gRPC is used.

    `program` and `rank` are in each line of JSON, the rank also in those of text.
    """
    os.environ |= {_LEVEL_VARIABLE: options.log_level, _FORMAT_VARIABLE: options.log_format}
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # gRPC writes to standard error itself
    level = logging.getLevelNamesMapping()[options.log_level.upper()]
    logging.basicConfig(
        level=logging.INFO if options.log_level == "debug" else max(level, logging.WARNING),
        handlers=[make_handler(options.log_format, sys.stderr, program, rank=rank)],
    )
    for name in _OWN:
        logging.getLogger(name).setLevel(level)
    _log_what_is_not_caught()


def make_handler(
    format: Format, stream: TextIO, program: str, *, rank: int | None = None, with_fields: bool = False
) -> logging.Handler:
    """Return a handler that writes lines to `stream`. `with_fields`: lines of text show the fields, too."""
    constant = {"program": program} if rank is None else {"program": program, "rank": rank}
    handler = logging.StreamHandler(stream)
    handler.setFormatter(_JsonFormatter(constant) if format == "json" else _TextFormatter(rank, with_fields))
    return handler


def with_fields(**fields: Any) -> dict[str, Any]:
    """Return the `extra` of a message that has these fields. Those that are None are left out."""
    return {"proa_fields": {name: value for name, value in fields.items() if value is not None}}


def json_line(created: float, level: str, message: str, fields: Mapping[str, Any]) -> str:
    """Return a line of JSON without its end. `created` is in Unix seconds."""
    time = datetime.fromtimestamp(created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return json.dumps({"time": time, "level": level.lower(), "message": message, **fields}, default=str)


class _JsonFormatter(logging.Formatter):
    def __init__(self, constant: Mapping[str, Any]) -> None:
        super().__init__()
        self._constant = constant

    def format(self, record: logging.LogRecord) -> str:
        fields = {"logger": record.name, **self._constant, **_fields_of_request(), **_fields(record)}
        if record.exc_info:
            fields["exception"] = self.formatException(record.exc_info)
        return json_line(record.created, record.levelname, record.getMessage(), fields)


class _TextFormatter(logging.Formatter):
    def __init__(self, rank: int | None, with_fields: bool) -> None:
        super().__init__(f"%(asctime)s %(levelname)s {'' if rank is None else f'rank {rank}: '}%(message)s")
        self._with_fields = with_fields

    def formatMessage(self, record: logging.LogRecord) -> str:
        if record.name.partition(".")[0] not in _OWN:
            record.message = f"{record.name}: {record.message}"
        fields = (_fields(record) if self._with_fields else {}) | _fields_of_request()
        return " ".join([super().formatMessage(record), *(f"{name}={_text(each)}" for name, each in fields.items())])


def _fields(record: logging.LogRecord) -> dict[str, Any]:
    fields: dict[str, Any] = getattr(record, "proa_fields", {})
    return fields


def _fields_of_request() -> dict[str, Any]:
    state = request_state.get({})
    return {name: value for name in _OF_REQUEST if (value := state.get(name))}


def _text(value: Any) -> str:
    """As JSON unless it is one plain word, so that no client's text can break the line."""
    is_word = isinstance(value, str) and value.isascii() and value.isprintable() and not {*' "='} & {*value}
    return value if is_word and value else json.dumps(value, default=str)


def _log_what_is_not_caught() -> None:
    log = logging.getLogger("proa")

    def on_exception(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not issubclass(kind, Exception):
            sys.__excepthook__(kind, error, trace)
            return
        log.critical("uncaught exception", exc_info=(kind, error, trace))

    def on_thread_exception(arguments: threading.ExceptHookArgs) -> None:
        name = arguments.thread.name if arguments.thread else "?"
        if arguments.exc_value is not None and not isinstance(arguments.exc_value, SystemExit):
            log.error("uncaught exception in thread %s", name, exc_info=arguments.exc_value)

    def on_unraisable(arguments: "sys.UnraisableHookArgs") -> None:
        log.error("%s %r", arguments.err_msg or "exception ignored in", arguments.object, exc_info=arguments.exc_value)

    def format_warning(
        message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
    ) -> str:
        return f"{category.__name__}: {message} ({filename}:{lineno})"

    sys.excepthook, threading.excepthook, sys.unraisablehook = on_exception, on_thread_exception, on_unraisable
    warnings.formatwarning = format_warning
    logging.captureWarnings(True)
