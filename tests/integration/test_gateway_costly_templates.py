"""A model whose chat template takes very long, behind one gateway with another model."""

import asyncio
import json
from collections.abc import AsyncIterator

import pytest

from support.fake_engine import FakeEngine, say, tokenizer_files
from support.gateway import RunningGateway, chat_body, running_gateway

CHAT = "/v1/chat/completions"
LOOPS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
ENDLESS = "{% if messages[0].content == 'slow' %}" + LOOPS + "{% endif %}"
COSTLY = {
    "slow": ENDLESS,
    "text": "{% if messages[0].content == 'text' %}{{ '%1000000000d' % 1 }}{% endif %}",
    "number": "{% if messages[0].content == 'number' %}{{ 10**10000000 }}{% endif %}",
}
PLAIN = "{% for message in messages %}{{ message.content }}{% endfor %}"


def files_with(template: object) -> dict[str, bytes]:
    config = {"eos_token": "<eos>", "chat_template": template}
    return tokenizer_files() | {"tokenizer_config.json": json.dumps(config).encode()}


@pytest.fixture
async def gateway() -> AsyncIterator[RunningGateway]:
    files = files_with("".join(COSTLY.values()) + PLAIN)
    async with (
        FakeEngine(script=say("fine")) as healthy,
        FakeEngine(script=say("fine"), model_name="costly", files=files, max_model_len=10**6) as costly,
        running_gateway(healthy, costly, trust_request_chat_template=True) as gateway,
    ):
        yield gateway


@pytest.mark.parametrize("text", COSTLY)
async def test_the_error_names_the_model_and_other_requests_go_on(gateway: RunningGateway, text: str) -> None:
    answer = await gateway.chat(text, model="costly")
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["message"].startswith("The chat template of the model 'costly' was stopped: it ")
    assert (error["type"], error["param"]) == ("invalid_request_error", "messages")
    assert (await gateway.chat("short", model="costly")).status_code == 200


async def test_other_models_answer_while_a_template_runs(gateway: RunningGateway) -> None:
    costly = asyncio.create_task(gateway.chat("slow", model="costly"))
    answers = [await gateway.chat() for _ in range(3)]
    assert not costly.done()
    assert [answer.status_code for answer in answers] == [200] * 3
    assert (await costly).status_code == 400


async def test_a_requests_own_template_is_stopped_and_named(gateway: RunningGateway) -> None:
    for template in (ENDLESS, "{{ 'x' * 10000000000 }}", "x" * 1_000_000):
        answer = await gateway.http.post(CHAT, json=chat_body("slow", chat_template=template))
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert error["message"].startswith("chat_template")
        assert error["param"] == "chat_template"
    answer = await gateway.http.post(CHAT, json=chat_body("Hi", chat_template=PLAIN))
    assert answer.status_code == 200


async def test_a_long_conversation_gives_the_same_prompt_on_a_thread(gateway: RunningGateway) -> None:
    messages = [{"role": "user", "content": "xy" * 50}] * 3000
    answer = await gateway.http.post("/tokenize", json={"model": "costly", "messages": messages})
    assert answer.json()["count"] == 3000 * len("xy" * 50)
