"""OpenAI's client: models, chat completions, completions."""

import json

import openai
from openai import OpenAI
from pydantic import BaseModel, Field

from client_checks.tools import CAPITAL, PERSON, QUESTION, TOOL, raised

MESSAGES = [{"role": "user", "content": CAPITAL}]
ASKS = [{"role": "user", "content": QUESTION}]


class Person(BaseModel):
    name: str = Field(max_length=10)
    age: int = Field(ge=0, le=99)


def client(url: str) -> OpenAI:
    return OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)


def check_models(url: str, model: str) -> None:
    assert model in [each.id for each in client(url).models.list()]
    assert client(url).models.retrieve(model).id == model


def check_chat(url: str, model: str) -> None:
    answer = client(url).chat.completions.create(model=model, messages=MESSAGES, temperature=0)
    assert "Paris" in answer.choices[0].message.content
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def check_chat_stream(url: str, model: str) -> None:
    options = {"include_usage": True}
    stream = client(url).chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, stream=True, stream_options=options
    )
    chunks = list(stream)
    assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert chunks[-1].usage.completion_tokens > 1


def check_chat_stream_helper(url: str, model: str) -> None:
    with client(url).chat.completions.stream(model=model, messages=MESSAGES, temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "content.delta" in kinds
    assert "Paris" in final.choices[0].message.content


def check_chat_n_logprobs_seed(url: str, model: str) -> None:
    answers = [
        client(url).chat.completions.create(
            model=model, messages=MESSAGES, n=2, seed=7, logprobs=True, top_logprobs=3, max_tokens=5
        )
        for _ in range(2)
    ]
    texts = [[choice.message.content for choice in answer.choices] for answer in answers]
    assert texts[0] == texts[1]
    assert len(answers[0].choices[1].logprobs.content[0].top_logprobs) == 3


def check_tool_auto(url: str, model: str) -> None:
    answer = client(url).chat.completions.create(model=model, messages=ASKS, tools=[TOOL], temperature=0)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert call.function.name == "get_weather"
    assert json.loads(call.function.arguments) == {"city": "Rome"}


def check_tool_stream_helper(url: str, model: str) -> None:
    with client(url).chat.completions.stream(model=model, messages=ASKS, tools=[TOOL], temperature=0) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()
    assert "tool_calls.function.arguments.delta" in kinds
    assert json.loads(final.choices[0].message.tool_calls[0].function.arguments) == {"city": "Rome"}


def check_tool_round_trip(url: str, model: str) -> None:
    create = client(url).chat.completions.create
    first = create(model=model, messages=ASKS, tools=[TOOL], temperature=0).choices[0].message
    result = {"role": "tool", "tool_call_id": first.tool_calls[0].id, "content": '{"weather": "rain"}'}
    second = create(model=model, messages=[*ASKS, first.to_dict(), result], tools=[TOOL], temperature=0)
    assert second.choices[0].message.content


def check_tool_required_and_named(url: str, model: str) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice in ("required", named):
        answer = client(url).chat.completions.create(
            model=model, messages=MESSAGES, tools=[TOOL], tool_choice=choice, max_tokens=200
        )
        call = answer.choices[0].message.tool_calls[0]
        assert set(json.loads(call.function.arguments)) <= {"city"}


def check_json_object(url: str, model: str) -> None:
    answer = client(url).chat.completions.create(
        model=model, messages=MESSAGES, response_format={"type": "json_object"}, temperature=0, max_tokens=300
    )
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(answer.choices[0].message.content), dict)


def check_json_schema(url: str, model: str) -> None:
    schema = {"name": "person", "schema": PERSON, "strict": True}
    answer = client(url).chat.completions.create(
        model=model, messages=MESSAGES, response_format={"type": "json_schema", "json_schema": schema}
    )
    Person.model_validate_json(answer.choices[0].message.content)


def check_parse(url: str, model: str) -> None:
    answer = client(url).chat.completions.parse(model=model, messages=MESSAGES, response_format=Person)
    assert isinstance(answer.choices[0].message.parsed, Person)


def check_completion(url: str, model: str) -> None:
    answer = client(url).completions.create(
        model=model, prompt=["One", "Two"], max_tokens=5, echo=True, logprobs=1, temperature=0
    )
    assert [choice.text[:3] for choice in answer.choices] == ["One", "Two"]
    assert answer.choices[0].logprobs.token_logprobs[0] is None


def check_completion_stream(url: str, model: str) -> None:
    stream = client(url).completions.create(
        model=model, prompt="One", max_tokens=5, stream=True, extra_body={"ignore_eos": True}
    )
    assert "".join(chunk.choices[0].text for chunk in stream)


def check_errors(url: str, model: str) -> None:
    create = client(url).chat.completions.create
    unknown = raised(openai.NotFoundError, lambda: create(model="other", messages=MESSAGES))
    assert unknown.body["code"] == "model_not_found"
    invalid = raised(openai.BadRequestError, lambda: create(model=model, messages=MESSAGES, temperature=9))
    assert invalid.body["param"] == "temperature"


def check_embeddings(url: str, model: str) -> None:
    answer = client(url).embeddings.create(model=model, input=["one", "two"])
    assert len(answer.data) == 2
