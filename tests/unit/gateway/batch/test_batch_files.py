"""Lines of a batch's input and output, and the output file that a later run continues."""

import json
from pathlib import Path
from typing import Any

import pytest

from proa_gateway.batch.files import (
    Answered,
    BatchRequest,
    BatchResponse,
    LineError,
    error_line,
    num_output_tokens,
    open_output,
    read_requests,
    response_line,
)

GOOD: dict[str, Any] = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": []}}
REQUEST = BatchRequest("a", "/v1/chat/completions", {"messages": []})


def line(**changes: Any) -> bytes:
    return json.dumps({**GOOD, **changes}).encode() + b"\n"


def codes(*lines: bytes) -> list[str]:
    return ["" if isinstance(each, BatchRequest) else each.code for each in read_requests(lines)]


def test_a_request_line_is_read() -> None:
    assert list(read_requests([line(), b"\n", line(custom_id="b", priority=3)])) == [
        REQUEST,
        BatchRequest("b", REQUEST.url, REQUEST.body),
    ]


@pytest.mark.parametrize(
    ("wrong", "code"),
    [
        (b"{", "invalid_json"),
        (b'"\xff"', "invalid_json"),
        (b"[]", "invalid_request"),
        (b"{}", "invalid_custom_id"),
        (line(custom_id=5), "invalid_custom_id"),
        (line(method="GET"), "invalid_method"),
        (line(url="v1/chat/completions"), "invalid_url"),
        (line(url="//elsewhere/v1"), "invalid_url"),
        (line(url="http://elsewhere/v1"), "invalid_url"),
        (line(body="text"), "invalid_body"),
        (line(body={"stream": True}), "invalid_body"),
    ],
)
def test_a_wrong_line_is_an_error_and_the_others_are_read(wrong: bytes, code: str) -> None:
    assert codes(line(custom_id="x"), wrong, line(custom_id="y")) == ["", code, ""]


def test_a_custom_id_is_used_once() -> None:
    assert codes(line(), line(), line(custom_id="b"), line()) == ["", "duplicate_custom_id", "", "duplicate_custom_id"]


def test_the_output_of_a_request_has_the_response() -> None:
    output = json.loads(response_line(REQUEST, BatchResponse(404, "r1", {"error": {}})))
    assert output.pop("id").startswith("batch_req_")
    assert output == {
        "custom_id": "a",
        "response": {"status_code": 404, "request_id": "r1", "body": {"error": {}}},
        "error": None,
    }


def test_the_output_of_a_wrong_line_has_its_number() -> None:
    output = json.loads(error_line(LineError(7, "invalid_json", "No.")))
    assert (output["custom_id"], output["response"]) == (None, None)
    assert output["error"] == {"code": "invalid_json", "message": "No.", "line": 7}


def test_the_output_says_what_is_answered() -> None:
    answered = Answered()
    answered.add(response_line(REQUEST, BatchResponse(200, "", {})))
    answered.add(response_line(BatchRequest("b", "/", {}), BatchResponse(400, "", {})))
    answered.add(error_line(LineError(3, "duplicate_custom_id", "", "c")))  # the line that has the id may not be
    assert (answered.custom_ids, answered.lines, answered.num_failed) == ({"a", "b"}, {3}, 2)


def test_tokens_are_counted_in_the_responses_of_all_apis() -> None:
    assert num_output_tokens({"usage": {"completion_tokens": 3}}) == 3
    assert num_output_tokens({"usage": {"output_tokens": 4}}) == 4
    assert num_output_tokens({"meta_info": {"completion_tokens": 5}}) == 5
    others: list[Any] = [{}, [], "text", {"usage": None}]
    assert [num_output_tokens(body) for body in others] == [0, 0, 0, 0]


def test_a_broken_last_line_is_removed_before_lines_are_appended(tmp_path: Path) -> None:
    path, first = tmp_path / "out.jsonl", response_line(REQUEST, BatchResponse(200, "", {}))
    path.write_bytes(first + first.replace(b'"a"', b'"b"')[:-20])
    with open_output(path) as (file, answered):
        file.write(b"next\n")
    assert answered.custom_ids == {"a"}
    assert path.read_bytes() == first + b"next\n"


@pytest.mark.parametrize("content", [b"text\n", b"{}\n", b'{"custom_id": "a", "response": 5, "error": null}\n'])
def test_another_file_is_not_overwritten(content: bytes, tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="line 1 is not the output of a batch"), open_output(path):
        pass
    assert path.read_bytes() == content
