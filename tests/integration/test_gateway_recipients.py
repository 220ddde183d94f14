"""Chats with Muse Glimmer: its template selects the format of messages with recipients, each call is one, and only
`<|eot|>` ends an output."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from support.fake_engine import FakeEngine, Reply, prompt_ids
from support.gateway import RunningGateway, running_gateway
from support.tokenizers import byte_level_tokenizer

SPECIAL = ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
TEMPLATE = """{%- macro written(call) %}<|start|>assistant to={{ call.name }}<|message|><atem:function_calls>
<atem:invoke name="{{ call.name }}">
{% for key, value in call.arguments.items() %}<atem:parameter name="{{ key }}">{{ value }}</atem:parameter>
{% endfor %}</atem:invoke>
</atem:function_calls>{% endmacro %}
{%- if tools %}{{ '<|start|>system<|message|>' ~ (tools | tojson) ~ '<|eot|>' }}{% endif %}
{%- for message in messages %}
{%- if message.reasoning_content %}<|start|>assistant to=self<|message|>
{{- message.reasoning_content }}<|eom|>{% endif %}
{%- for call in message.tool_calls or [] %}{{ written(call.function) }}{{ '<|eot|>' if loop.last else '<|eom|>' }}
{%- else %}<|start|>{{ message.role }}{{ ' to=user' if message.role == 'assistant' }}<|message|>
{{- message.content }}<|eot|>{% endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"""
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
    },
}
REASONING = " to=self<|message|>Hm.<|eom|><|start|>assistant"
NEXT = "<|eom|><|start|>assistant"

TOKENIZER = byte_level_tokenizer()
TOKENIZER.add_special_tokens(list(SPECIAL))
ENDS = TOKENIZER.encode("<|eot|>").ids
FILES = {
    "generation_config.json": json.dumps({"eos_token_id": ENDS}).encode(),
    "tokenizer.json": TOKENIZER.to_str().encode(),
    "tokenizer_config.json": json.dumps({"eos_token": "<|eot|>", "chat_template": TEMPLATE}).encode(),
}


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(files=FILES) as engine:
        engine.info.eos_token_ids[:] = ENDS
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


def call(city: str, days: int) -> str:
    parameters = (
        f'<atem:parameter name="city">{city}</atem:parameter>\n<atem:parameter name="days">{days}</atem:parameter>'
    )
    invoke = f'<atem:invoke name="get_weather">\n{parameters}\n</atem:invoke>'
    return f" to=get_weather<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>"


async def messages(gateway: RunningGateway, engine: FakeEngine, text: str, **more: Any) -> list[Any]:
    """The model's output `text`, as the choice of a whole and of a streamed completion."""
    engine.script = lambda request: Reply(TOKENIZER.encode(text).ids)
    fields: dict[str, Any] = {
        "model": "fake",
        "messages": [{"role": "user", "content": "Rome?"}],
        "tools": [WEATHER],
        **more,
    }
    whole = await gateway.openai.chat.completions.create(**fields)
    async with gateway.openai.chat.completions.stream(**fields) as stream:
        async for _ in stream:
            pass
        streamed = await stream.get_final_completion()
    return [whole.choices[0], streamed.choices[0]]


async def test_a_message_to_the_user_is_content(gateway: RunningGateway, engine: FakeEngine) -> None:
    for choice in await messages(gateway, engine, f"{REASONING} to=user<|message|>It is warm.<|eot|>"):
        assert (choice.message.content, choice.finish_reason) == ("It is warm.", "stop")
        assert choice.message.reasoning_content == "Hm."
    assert TOKENIZER.decode(prompt_ids(engine.requests[0]), skip_special_tokens=False).endswith("<|start|>assistant")


async def test_messages_to_tools_are_calls(gateway: RunningGateway, engine: FakeEngine) -> None:
    text = f"{REASONING}{call('Rome', 2)}{NEXT}{call(' Oslo', 3)}<|eot|>"
    for choice in await messages(gateway, engine, text, tool_choice="required"):
        made = [json.loads(each.function.arguments) for each in choice.message.tool_calls]
        assert made == [{"city": "Rome", "days": 2}, {"city": " Oslo", "days": 3}]
        assert (choice.message.content or None, choice.finish_reason) == (None, "tool_calls")
    assert "<atem:invoke" in engine.requests[0].sampling_params.grammar.text


async def test_calls_stand_in_the_next_prompt_as_the_model_wrote_them(
    gateway: RunningGateway, engine: FakeEngine
) -> None:
    text = f"{REASONING}{call('Rome', 2)}{NEXT}{call('Oslo', 3)}"
    (choice, _) = await messages(gateway, engine, f"{text}<|eot|>")
    history = [
        {"role": "user", "content": "Rome?"},
        choice.message.model_dump(exclude_none=True),
        *({"role": "tool", "tool_call_id": each.id, "content": "fine"} for each in choice.message.tool_calls),
    ]
    await messages(gateway, engine, " to=user<|message|>Fine.<|eot|>", messages=history)
    prompt = TOKENIZER.decode(prompt_ids(engine.requests[-1]), skip_special_tokens=False)
    assert f"<|start|>assistant{text}<|eot|>" in prompt
