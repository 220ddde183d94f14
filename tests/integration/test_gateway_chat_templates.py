"""Conversations that a chat template does not read, by every API of chats."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from proa.fit_messages import LATER_SYSTEM, USERS
from support.fake_engine import FakeEngine, prompt_ids, say, tokenizer_files
from support.gateway import RunningGateway, running_gateway
from support.strict_templates import STRICT_TEMPLATES, STRICTEST
from support.tokenizers import byte_level_tokenizer

SYSTEM, USER, ANSWER = ({"role": role, "content": role.title()} for role in ("system", "user", "assistant"))
LATER = {"role": "system", "content": "Later"}
PROMPT = """<system>System</end>
<user>User</end>
<assistant>Assistant</end>
<user>User

<system-reminder>
Later
</system-reminder></end>
<assistant>"""
WARNINGS = f"{LATER_SYSTEM}; {USERS}"


@asynccontextmanager
async def serving(source: str, **options: Any) -> AsyncIterator[tuple[RunningGateway, FakeEngine]]:
    files = tokenizer_files() | {"chat_template.jinja": source.encode()}
    async with (
        FakeEngine(script=say("one"), files=files, max_model_len=1000) as engine,
        running_gateway(engine, **options) as gateway,
    ):
        yield gateway, engine


def prompts(engine: FakeEngine) -> list[str]:
    return [byte_level_tokenizer().decode(prompt_ids(each), skip_special_tokens=False) for each in engine.requests]


MESSAGES = [SYSTEM, USER, ANSWER, USER, LATER]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/chat/completions/batch": {"messages": [MESSAGES]},
    "/v1/responses": {"instructions": "System", "input": MESSAGES[1:]},
    "/v1/messages": {"system": "System", "messages": MESSAGES[1:], "max_tokens": 5},
}


@pytest.mark.parametrize("path", BODIES)
async def test_each_api_fits_conversations_and_warns(path: str) -> None:
    async with serving(STRICTEST) as (gateway, engine):
        response = await gateway.http.post(path, json={"model": "fake", **BODIES[path]})
        assert response.status_code == 200, response.text
        assert response.headers["x-proa-warnings"] == WARNINGS
        assert prompts(engine) == [PROMPT]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/tokenize", BODIES["/v1/chat/completions"]),
        ("/v1/messages/count_tokens", BODIES["/v1/messages"]),
        ("/v1/responses/input_tokens", BODIES["/v1/responses"]),
    ],
)
async def test_counts_are_those_of_the_fitted_prompt(path: str, body: dict[str, Any]) -> None:
    async with serving(STRICTEST) as (gateway, _):
        counted = await gateway.http.post(path, json={"model": "fake", **body})
        assert counted.status_code == 200, counted.text
        count = counted.json().get("count") or counted.json()["input_tokens"]
        assert count == len(byte_level_tokenizer().encode(PROMPT).ids)


async def test_a_template_that_reads_the_conversation_gets_it_without_a_warning() -> None:
    async with serving(STRICTEST) as (gateway, engine):
        response = await gateway.http.post("/v1/chat/completions", json={"model": "fake", "messages": MESSAGES[:4]})
        assert "x-proa-warnings" not in response.headers
        assert prompts(engine) == [PROMPT.replace("\n\n<system-reminder>\nLater\n</system-reminder>", "")]


async def test_a_requests_own_template_is_probed_too() -> None:
    source, _ = STRICT_TEMPLATES["one system, first"]
    async with serving("{{ messages[0].content }}", trust_request_chat_template=True) as (gateway, engine):
        body = {"model": "fake", "messages": MESSAGES, "chat_template": source}
        response = await gateway.http.post("/v1/chat/completions", json=body)
        assert response.headers["x-proa-warnings"] == LATER_SYSTEM
        assert "<user><system-reminder>\nLater\n</system-reminder></end>" in prompts(engine)[0]


async def test_special_tokens_stay_text_in_what_is_changed() -> None:
    messages = [USER, {"role": "system", "content": "<eos>"}]
    body = {"model": "fake", "messages": messages}
    async with serving(STRICTEST, plain_special_tokens=True) as (gateway, engine):
        assert (await gateway.http.post("/v1/chat/completions", json=body)).status_code == 200
        assert "<system-reminder>\n<eos>\n</system-reminder>" in prompts(engine)[0]
        eos = byte_level_tokenizer().token_to_id("<eos>")
        assert eos not in prompt_ids(engine.requests[0])
