"""Anthropic's client."""

import anthropic
from anthropic import Anthropic

from client_checks.tools import CAPITAL, FUNCTION, PARAMETERS, QUESTION, raised

GREEDY = {"extra_body": {"temperature": 0}}  # newer versions of the client have no such argument
TOOL = {"name": FUNCTION["name"], "description": FUNCTION["description"], "input_schema": PARAMETERS}


def client(url: str) -> Anthropic:
    return Anthropic(base_url=url, api_key="none", max_retries=0)


def user(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def check_create(url: str, model: str) -> None:
    answer = client(url).messages.create(model=model, max_tokens=50, messages=user(CAPITAL), **GREEDY)
    assert "Paris" in answer.content[0].text
    assert answer.stop_reason == "end_turn"


def check_stream(url: str, model: str) -> None:
    with client(url).messages.stream(model=model, max_tokens=50, messages=user(CAPITAL), **GREEDY) as stream:
        text = "".join(stream.text_stream)
        assert stream.get_final_message().content[0].text == text
    assert "Paris" in text


def check_tool_round_trip(url: str, model: str) -> None:
    fields = {"model": model, "max_tokens": 100, "tools": [TOOL], **GREEDY}
    first = client(url).messages.create(messages=user(QUESTION), **fields)
    (call,) = [block for block in first.content if block.type == "tool_use"]
    assert call.input == {"city": "Rome"}
    result = {"type": "tool_result", "tool_use_id": call.id, "content": '{"weather": "rain"}'}
    history = [
        *user(QUESTION),
        {"role": "assistant", "content": [block.to_dict() for block in first.content]},
        {"role": "user", "content": [result]},
    ]
    assert client(url).messages.create(messages=history, **fields).content[0].text


def check_tool_stream(url: str, model: str) -> None:
    fields = {"model": model, "max_tokens": 100, "tools": [TOOL], **GREEDY}
    with client(url).messages.stream(messages=user(QUESTION), **fields) as stream:
        final = stream.get_final_message()
    assert final.stop_reason == "tool_use"
    assert final.content[-1].input == {"city": "Rome"}


def check_count_tokens(url: str, model: str) -> None:
    count = client(url).messages.count_tokens(model=model, messages=user(CAPITAL)).input_tokens
    usage = client(url).messages.create(model=model, max_tokens=1, messages=user(CAPITAL)).usage
    assert count == usage.input_tokens + usage.cache_read_input_tokens


def check_errors(url: str, model: str) -> None:
    create = client(url).messages.create
    error = raised(anthropic.NotFoundError, lambda: create(model="other", max_tokens=5, messages=user("Hi")))
    assert error.body["error"]["type"] == "not_found_error"
