"""docs/openai-fields.md says what the gateway does with each field, and has all fields of OpenAI's client."""

import re
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from openai.types import completion_create_params
from openai.types.chat import completion_create_params as chat_create_params
from pydantic import BaseModel

from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.generation_job import GenerationCall
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.ignored_fields import NO_EFFECT, REFUSED_IN_CHAT, REFUSED_IN_COMPLETIONS, Refused

PAGE = Path(__file__).parents[3] / "docs" / "openai-fields.md"
ROW = re.compile(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.*)\|$", re.MULTILINE)
DOCUMENTED = {
    name: (chat, completions, note.strip()) for name, chat, completions, note in ROW.findall(PAGE.read_text())
}
BODIES = [
    (ChatCompletionRequest, {"messages": [{"role": "user", "content": "Hi"}]}),
    (CompletionRequest, {"prompt": "Hi"}),
]
ADVICE = {"verbosity"}  # fields of OpenAI's client that demand nothing: they are ignored, and named
ENDPOINTS: list[tuple[type[BaseModel], Mapping[str, Refused], type, type]] = [
    (
        ChatCompletionRequest,
        REFUSED_IN_CHAT,
        chat_create_params.CompletionCreateParamsNonStreaming,
        chat_create_params.CompletionCreateParamsStreaming,
    ),
    (
        CompletionRequest,
        REFUSED_IN_COMPLETIONS,
        completion_create_params.CompletionCreateParamsNonStreaming,
        completion_create_params.CompletionCreateParamsStreaming,
    ),
]


def outcome(name: str, model: type[BaseModel], refused: Mapping[str, Refused]) -> str:
    if name in model.model_fields:
        return "works"
    if name in NO_EFFECT:
        return "no effect"
    return "refused" if name in refused else "ignored"


@pytest.mark.parametrize(("model", "refused", "whole", "streaming"), ENDPOINTS)
def test_every_field_of_openais_client_has_an_outcome(
    model: type[BaseModel], refused: Mapping[str, Refused], whole: type, streaming: type
) -> None:
    names = whole.__annotations__.keys() | streaming.__annotations__.keys()
    for base in (*whole.__mro__, *streaming.__mro__):
        names |= getattr(base, "__annotations__", {}).keys()
    assert len(names) > 15
    assert {name for name in names if outcome(name, model, refused) == "ignored"} <= ADVICE


@pytest.mark.parametrize(("model", "base"), BODIES)
def test_an_empty_text_leaves_every_field_unset_that_may_be_null(model: type[BaseModel], base: dict[str, Any]) -> None:
    names = {name for name, field in model.model_fields.items() if field.default is None}
    assert names > {"stop", "temperature", "request_id", "response_format"}
    empty = model.model_validate({**base, **dict.fromkeys(names, "")})
    assert [name for name in names if getattr(empty, name) is not None] == []


def test_an_empty_prompt_is_sent() -> None:
    assert CompletionRequest.model_validate({"prompt": ""}).prompt == [""]


@pytest.mark.parametrize(("model", "base"), BODIES)
@pytest.mark.parametrize(
    ("options", "is_allowed"),
    [
        ({}, True),
        ({"include_usage": None}, True),
        ({"include_usage": False, "include_obfuscation": False}, True),
        ({"include_usage": True}, False),
        ({"include_obfuscation": True}, False),
    ],
)
def test_stream_options_that_change_nothing_need_no_stream(
    model: type[BaseModel], base: dict[str, Any], options: dict[str, Any], is_allowed: bool
) -> None:
    request = model.model_validate({**base, "stream_options": options})
    assert isinstance(request, GenerationRequest)
    call = SimpleNamespace(fields=request, num_prompts=1, num_choices=1, settings=SimpleNamespace(max_choices=1))
    with nullcontext() if is_allowed else pytest.raises(InvalidRequest, match="needs stream"):
        GenerationCall.check(cast(GenerationCall, call))


def test_the_page_has_the_outcome_of_every_field_and_the_reasons() -> None:
    known: set[str] = {*NO_EFFECT, *ADVICE}
    for model, refused, _, _ in ENDPOINTS:
        known |= model.model_fields.keys() | refused.keys()
    assert DOCUMENTED.keys() == known
    for name, (chat, completions, note) in DOCUMENTED.items():
        outcomes = [outcome(name, model, refused) for model, refused, _, _ in ENDPOINTS]
        assert [chat, completions] == outcomes, name
        if name in NO_EFFECT:
            assert note == NO_EFFECT[name]
        for endpoint_outcome, (_, refused, _, _) in zip(outcomes, ENDPOINTS, strict=True):
            if endpoint_outcome == "refused" and "works" in outcomes:
                assert note.endswith(refused[name].reason), name
        if outcomes[0] == "refused" and "works" not in outcomes:
            assert note == REFUSED_IN_CHAT[name].reason
