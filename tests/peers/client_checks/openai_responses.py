"""OpenAI's client: the Responses API."""

import json

from client_checks.openai_chat import Person, client
from client_checks.tools import CAPITAL, FUNCTION, QUESTION

TOOL = {"type": "function", **FUNCTION, "strict": True}


def check_create(url: str, model: str) -> None:
    answer = client(url).responses.create(model=model, input=CAPITAL, temperature=0)
    assert "Paris" in answer.output_text
    assert answer.status == "completed"
    assert client(url).responses.retrieve(answer.id).output_text == answer.output_text


def check_stream(url: str, model: str) -> None:
    with client(url).responses.stream(model=model, input=CAPITAL, temperature=0) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert kinds[0] == "response.created"
    assert "response.output_text.delta" in kinds
    assert "Paris" in final.output_text


def check_previous_response(url: str, model: str) -> None:
    first = client(url).responses.create(model=model, input="My name is Anna.", temperature=0)
    second = client(url).responses.create(
        model=model, input="What is my name?", previous_response_id=first.id, temperature=0
    )
    assert second.previous_response_id == first.id
    assert second.usage.input_tokens > first.usage.input_tokens


def check_tool(url: str, model: str) -> None:
    first = client(url).responses.create(model=model, input=QUESTION, tools=[TOOL], temperature=0)
    (call,) = [item for item in first.output if item.type == "function_call"]
    assert json.loads(call.arguments) == {"city": "Rome"}
    result = {"type": "function_call_output", "call_id": call.call_id, "output": '{"weather": "rain"}'}
    second = client(url).responses.create(
        model=model, input=[result], previous_response_id=first.id, tools=[TOOL], temperature=0
    )
    assert second.output_text


def check_parse(url: str, model: str) -> None:
    answer = client(url).responses.parse(model=model, input=CAPITAL, text_format=Person)
    assert isinstance(answer.output_parsed, Person)


def check_incomplete(url: str, model: str) -> None:
    answer = client(url).responses.create(model=model, input="Tell me a story.", max_output_tokens=5)
    assert answer.status == "incomplete"
    assert answer.incomplete_details.reason == "max_output_tokens"
