"""Logs are lines of text or of JSON; what is not caught, warnings and other packages' messages are in them too."""

import json
import logging
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextvars import copy_context
from io import StringIO

import pytest

from proa.logs import Format, LogOptions, make_handler, request_state, with_fields

TIME = r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3}"


class Log:
    """A logger of Proa's, and the lines that its handler has written."""

    def __init__(self, format: Format, *, name: str = "proa_gateway.test", **settings: object) -> None:
        self._stream = StringIO()
        self.handler = make_handler(format, self._stream, "gateway", **settings)  # type: ignore[arg-type]
        self.logger = logging.Logger(name)
        self.logger.addHandler(self.handler)

    @property
    def text(self) -> str:
        return self._stream.getvalue()

    @property
    def records(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.text.splitlines()]


@pytest.fixture
def in_request() -> Iterator[None]:
    token = request_state.set({"request_id": "abc", "trace_id": "0af7", "other": 1})
    yield
    request_state.reset(token)


def test_text_has_time_level_and_message() -> None:
    log = Log("text")
    log.logger.info("engine connected: %s", "a:1", extra=with_fields(engine="a:1"))
    assert re.fullmatch(TIME + r" INFO engine connected: a:1\n", log.text)


def test_json_has_the_time_of_rfc_3339_the_message_and_its_fields() -> None:
    log = Log("json")
    log.logger.warning("engine lost: %s", "a:1", extra=with_fields(engine="a:1", num_requests=3, reason=None))
    (record,) = log.records
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", str(record.pop("time")))
    assert record == {
        "level": "warning",
        "message": "engine lost: a:1",
        "logger": "proa_gateway.test",
        "program": "gateway",
        "engine": "a:1",
        "num_requests": 3,
    }


@pytest.mark.usefixtures("in_request")
def test_what_is_logged_while_a_request_is_served_has_its_ids() -> None:
    text, record = Log("text"), Log("json")
    text.logger.warning("the client reads nothing")
    record.logger.warning("the client reads nothing")
    assert text.text.endswith(" WARNING the client reads nothing request_id=abc trace_id=0af7\n")
    assert {"request_id": "abc", "trace_id": "0af7"}.items() <= record.records[0].items()
    assert "other" not in record.records[0]


def test_text_with_fields_shows_them_and_no_value_can_break_the_line() -> None:
    log = Log("text", with_fields=True)
    log.logger.info("GET /", extra=with_fields(status=200, model="a\nb", reason="it's", agent="x y", ratio=0.5))
    assert log.text.endswith(' INFO GET / status=200 model="a\\nb" reason=it\'s agent="x y" ratio=0.5\n')


def test_lines_of_a_rank_name_it() -> None:
    text, record = Log("text", rank=3), Log("json", rank=3)
    text.logger.info("connected")
    record.logger.info("connected")
    assert text.text.endswith(" INFO rank 3: connected\n")
    assert record.records[0]["rank"] == 3


def test_an_exception_is_in_one_line_of_json() -> None:
    log = Log("json")
    try:
        raise RuntimeError("broken\nin two lines")
    except RuntimeError:
        log.logger.exception("a step failed")
    (record,) = log.records
    assert record["level"] == "error"
    assert "RuntimeError: broken\nin two lines" in str(record["exception"])


def test_json_takes_text_that_is_not_utf_8() -> None:
    log = Log("json")
    log.logger.info("unknown model", extra=with_fields(model="\udcff"))
    assert log.text.isascii()
    assert log.records[0]["model"] == "\udcff"


def test_messages_of_other_packages_have_their_loggers_name() -> None:
    log = Log("text", name="uvicorn.error")
    log.logger.error("Exception in ASGI application")
    assert log.text.endswith(" ERROR uvicorn.error: Exception in ASGI application\n")


def test_requests_in_other_contexts_have_no_ids() -> None:
    log = Log("json")
    copy_context().run(lambda: request_state.set({"request_id": "abc"}))
    log.logger.info("idle")
    assert "request_id" not in log.records[0]


_PROGRAM = """
import asyncio, gc, logging, sys, threading, warnings
from proa.logs import LogOptions, configure
configure(LogOptions(log_level=sys.argv[1], log_format=sys.argv[2]), "engine")
logging.getLogger("proa_engine.x").debug("own debug")
logging.getLogger("proa_engine.x").info("own info")
logging.getLogger("httpx").info("foreign info")
logging.getLogger("httpx").warning("foreign warning")
warnings.warn("deprecated", DeprecationWarning)
def fail(): raise ValueError("in a thread")
thread = threading.Thread(target=fail, name="proa-io"); thread.start(); thread.join()
class Broken:
    def __del__(self): raise ValueError("in a destructor")
Broken()
async def run():
    task = asyncio.create_task(asyncio.to_thread(fail)); await asyncio.wait([task]); del task; gc.collect()
asyncio.run(run())
raise RuntimeError("at the end")
"""


def run_program(level: str, format: str) -> list[str]:
    environment = {**os.environ, "PYTHONWARNINGS": "always"}
    command = [sys.executable, "-c", _PROGRAM, level, format]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert done.returncode == 1
    assert done.stdout == ""
    return done.stderr.splitlines()


def test_warnings_and_what_is_not_caught_are_lines_of_json_too() -> None:
    records = [json.loads(line) for line in run_program("info", "json")]
    seen = [(record["level"], record["logger"], record["message"].partition(" (")[0]) for record in records]
    assert seen[:5] == [
        ("info", "proa_engine.x", "own info"),
        ("warning", "httpx", "foreign warning"),
        ("warning", "py.warnings", "DeprecationWarning: deprecated"),
        ("error", "proa", "uncaught exception in thread proa-io"),
        ("error", "proa", seen[4][2]),
    ]
    assert seen[4][2].startswith("exception ignored in")
    assert seen[-1] == ("critical", "proa", "uncaught exception")
    assert [name for _, name, _ in seen[5:-1]] == ["asyncio"]
    assert "RuntimeError: at the end" in records[-1]["exception"]
    assert {record["program"] for record in records} == {"engine"}


def test_the_level_is_that_of_own_messages_and_other_packages_log_less() -> None:
    debug = "\n".join(run_program("debug", "text"))
    assert "DEBUG own debug" in debug
    assert "INFO httpx: foreign info" in debug
    error = "\n".join(run_program("error", "text"))
    assert "own info" not in error
    assert "foreign warning" not in error
    assert "RuntimeError: at the end" in error


def test_processes_that_a_program_starts_log_as_it_does() -> None:
    inner = "from proa.logs import LogOptions; print(LogOptions.from_environment())"
    program = (
        "import subprocess, sys; from proa.logs import LogOptions, configure; "
        'configure(LogOptions(log_level="error", log_format="json"), "engine"); '
        f"subprocess.run([sys.executable, '-c', {inner!r}], check=True)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == str(LogOptions(log_level="error", log_format="json"))


@pytest.mark.parametrize("options", [{"log_level": "trace"}, {"log_format": "xml"}])
def test_unknown_levels_and_formats_are_refused(options: dict[str, str]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be one of"):
        LogOptions(**options)  # type: ignore[arg-type]
