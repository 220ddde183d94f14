"""`proa serve` prints its programs' lines with their names in text, and nothing but JSON with --log-format json."""

import json

import pytest

from proa.logs import LogOptions
from proa_cli.arguments import read_arguments
from proa_cli.output import JsonOutput, TextOutput

LINE = '{"time": "2026-11-24T16:43:03.063Z", "level": "info", "message": "weights loaded", "program": "engine"}'
FAILURE = '{"time": "2026-11-24T16:43:03.063Z", "level": "critical", "message": "no such model", "program": "engine"}'


def test_text_has_the_programs_name_in_front(capsys: pytest.CaptureFixture[str]) -> None:
    output = TextOutput()
    output.of_program("engine", "weights loaded")
    output.own("stopping")
    output.own("error: no such model", level="error")
    shown = capsys.readouterr()
    assert shown.out == "engine  | weights loaded\nproa: stopping\n"
    assert shown.err == "proa serve: error: no such model\n"


def test_json_lines_are_passed_on_and_all_others_become_json(capsys: pytest.CaptureFixture[str]) -> None:
    output = JsonOutput()
    output.of_program("engine", LINE)
    for line in ('{"time": broken', "Killed", '{"answer": 1}'):
        output.of_program("engine", line)
    output.own("stopping")
    output.own("--x has no effect", level="warning")
    output.own("error: no such model", level="error")
    shown = capsys.readouterr()
    first, *others = shown.out.splitlines()
    assert first == LINE
    records = [json.loads(line) for line in others]
    assert [(record["level"], record["program"], record["message"]) for record in records] == [
        ("info", "engine", '{"time": broken'),
        ("info", "engine", "Killed"),
        ("info", "engine", '{"answer": 1}'),
        ("info", "proa", "stopping"),
    ]
    assert [(record["level"], record["message"]) for record in map(json.loads, shown.err.splitlines())] == [
        ("warning", "--x has no effect"),
        ("error", "error: no such model"),
    ]


def test_the_reason_of_an_exit_is_found_in_both_formats() -> None:
    text = "proa-engine: error: no such model"
    assert (
        TextOutput().error_of(text) == JsonOutput().error_of(text) == JsonOutput().error_of(FAILURE) == "no such model"
    )
    assert not TextOutput().error_of("weights loaded")
    assert not JsonOutput().error_of(LINE)


def test_the_reason_of_an_exit_without_one_is_the_last_message_and_a_stack_is_printed() -> None:
    crash = json.dumps({**json.loads(FAILURE), "message": "uncaught exception", "exception": "Traceback:\nOSError: no"})
    output = JsonOutput()
    assert output.message_of(LINE) == "weights loaded"
    assert output.message_of("Killed") == TextOutput().message_of("Killed") == "Killed"
    assert not output.error_of(crash)
    assert output.message_of(crash) == "uncaught exception: OSError: no"


def test_level_and_format_go_to_both_programs() -> None:
    arguments = read_arguments(["builtin", "--log-level=warning", "--log-format", "json"])
    for program in (arguments.engine, arguments.gateway):
        assert program.logs == LogOptions(log_level="warning", log_format="json")
