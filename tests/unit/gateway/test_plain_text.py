"""Special tokens in the texts of a conversation are plain text; those of the chat template stay special."""

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from tokenizers import AddedToken, pre_tokenizers

from proa_gateway.apis.chat.job import conversation_of
from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.chat_prompt import render_prompt, template_messages
from proa_gateway.serving.plain_text import plain_conversation
from proa_gateway.tokenizer import MARK, ControlTokens, Tokenizer
from support.tokenizers import byte_level_tokenizer, metaspace_tokenizer


@dataclass(frozen=True, kw_only=True)
class Style:
    """`special`: tokens that the tokenizer's files call special, `added`: others. `closing`: ends a message."""

    template: str
    special: list[str]
    closing: str
    added: tuple[str, ...] = ()
    spaces: bool = False  # words begin with ▁, as in SentencePiece


STYLES = {
    "chatml": Style(
        template="{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
        "<|im_end|>\n{% endfor %}{{ tools | tojson if tools }}<|im_start|>assistant\n",
        special=["<|im_start|>", "<|im_end|>"],
        closing="<|im_end|>",
        added=("<tool_call>", "</tool_call>"),
    ),
    "llama3": Style(
        template="{{ bos_token }}{% for m in messages %}<|start_header_id|>{{ m.role }}<|end_header_id|>\n\n"
        "{{ m.content | trim }}<|eot_id|>{% endfor %}<|start_header_id|>assistant<|end_header_id|>\n\n",
        special=["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"],
        closing="<|eot_id|>",
    ),
    "gemma": Style(
        template="{% for m in messages %}<start_of_turn>{{ m.role }}\n"
        "{% for part in m.content if m.content is not string %}{{ part.text | trim }}{% endfor %}"
        "{{ m.content if m.content is string }}<end_of_turn>\n{% endfor %}",
        special=["<start_of_turn>", "<end_of_turn>"],
        closing="<end_of_turn>",
        added=("\n\n", "<table>"),
        spaces=True,
    ),
    "mistral": Style(
        template="{% for m in messages %}{{ '[INST]' + m.content + '[/INST]' }}{% endfor %}",
        special=["[INST]", "[/INST]", "[TOOL_CALLS]"],
        closing="[/INST]",
    ),
    "deepseek": Style(
        template="{% for m in messages %}{% if m.role == 'user' %}<\uff5cUser\uff5c>{{ m.content }}{% else %}"
        "<\uff5cAssistant\uff5c>{{ m.content.split('</think>')[-1] }}<\uff5cend\uff5c>{% endif %}{% endfor %}"
        "<\uff5cAssistant\uff5c><think>\n",
        special=["<\uff5cend\uff5c>"],
        closing="<\uff5cAssistant\uff5c>",
        added=("<\uff5cUser\uff5c>", "<\uff5cAssistant\uff5c>", "</think>"),
    ),
    "phi": Style(
        template="{% for m in messages %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}<|assistant|>",
        special=["<|user|>", "<|assistant|>", "<|end|>"],
        closing="<|end|>",
    ),
}


@pytest.fixture(scope="module")
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@pytest.fixture(params=STYLES)
def style(request: pytest.FixtureRequest) -> Style:
    return STYLES[request.param]


def tokenizer_of(style: Style, executor: ThreadPoolExecutor) -> Tokenizer:
    raw = metaspace_tokenizer(strip=False) if style.spaces else byte_level_tokenizer()
    if style.spaces:
        raw.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    raw.add_special_tokens([AddedToken(token, normalized=False) for token in style.special])
    raw.add_tokens([AddedToken(token, special=False) for token in style.added])
    config = {"chat_template": style.template, "bos_token": style.special[0]}
    files = {"tokenizer.json": raw.to_str().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    return Tokenizer(files, executor)


async def encoded(tokenizer: Tokenizer, *messages: Any, **fields: Any) -> list[int]:
    request = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    conversation = plain_conversation(conversation_of(request), tokenizer)
    assert tokenizer.chat_template is not None
    sent = template_messages(conversation.messages)
    text = await render_prompt(conversation, sent, tokenizer.chat_template, tokenizer.templates)
    return await tokenizer.encode_marked(text, add_special_tokens=False)


async def controls(tokenizer: Tokenizer, style: Style, *messages: Any, **fields: Any) -> list[int]:
    """The special tokens of the prompt, and those that the template writes."""
    names = [name for name in (*style.special, *style.added) if name not in ("\n\n", "<table>")]
    ids = {tokenizer.added_tokens[name] for name in names}
    return [token_id for token_id in await encoded(tokenizer, *messages, **fields) if token_id in ids]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


async def test_a_text_does_not_end_its_message(style: Style, executor: ThreadPoolExecutor) -> None:
    tokenizer = tokenizer_of(style, executor)
    expected = await controls(tokenizer, style, user("Hi"))
    for token in (*style.special, *style.added):
        for text in (
            token,
            f"one {token} two",
            token * 3,
            f"{token[:-1]}{token}",
            f"{MARK}{token[:2]}{MARK}{token[2:]}",
        ):
            assert await controls(tokenizer, style, user(text)) == expected


async def test_the_text_itself_stays(style: Style, executor: ThreadPoolExecutor) -> None:
    tokenizer = tokenizer_of(style, executor)
    text = f"one {style.closing} two {style.special[0]}"
    assert text in tokenizer.decode(await encoded(tokenizer, user(text)))


async def test_other_texts_have_the_same_tokens_as_without(style: Style, executor: ThreadPoolExecutor) -> None:
    tokenizer = tokenizer_of(style, executor)
    request = ChatCompletionRequest.model_validate({"messages": [user("a < b [c] |\n\n<table> \U0001f600")]})
    assert tokenizer.chat_template is not None
    sent = template_messages(request.messages)
    text = await render_prompt(conversation_of(request), sent, tokenizer.chat_template, tokenizer.templates)
    assert await encoded(tokenizer, *request.messages) == await tokenizer.encode(text, add_special_tokens=False)


async def test_parts_do_not_make_a_token_together(style: Style, executor: ThreadPoolExecutor) -> None:
    tokenizer = tokenizer_of(style, executor)
    expected = await controls(tokenizer, style, user("Hi"))
    for size in range(1, len(style.closing)):
        for space in ("", " \n"):
            parts = [style.closing[:size] + space, space + style.closing[size:]]
            content = [{"type": "text", "text": part} for part in parts]
            assert await controls(tokenizer, style, user(content)) == expected


async def test_tools_calls_names_and_results_are_texts_too(executor: ThreadPoolExecutor) -> None:
    style = STYLES["chatml"]
    tokenizer = tokenizer_of(style, executor)

    def chat(text: str) -> tuple[list[Any], dict[str, Any]]:
        escaped = json.dumps({text: [text]}).replace("<", "\\u003c")
        call = {"id": "a", "function": {"name": text, "arguments": escaped}}
        messages = [
            user("Hi"),
            {"role": "assistant", "content": text, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "a", "content": text},
        ]
        function = {"name": "f", "description": text, "parameters": {"properties": {text: {"const": text}}}}
        return messages, {"tools": [{"type": "function", "function": function}]}

    messages, fields = chat("x")
    expected = await controls(tokenizer, style, *messages, **fields)
    messages, fields = chat("<|im_end|>")
    assert await controls(tokenizer, style, *messages, **fields) == expected


async def test_templates_find_the_reasoning_of_an_assistants_message(executor: ThreadPoolExecutor) -> None:
    style = STYLES["deepseek"]
    tokenizer = tokenizer_of(style, executor)
    answer = {"role": "assistant", "content": "why</think>because<\uff5cend\uff5c>"}
    text = tokenizer.decode(await encoded(tokenizer, user("Hi"), answer))
    assert "why" not in text
    assert "because" in text
    assert len(await controls(tokenizer, style, user("Hi"), answer)) == 4


async def test_a_role_of_the_clients_own_is_no_token(executor: ThreadPoolExecutor) -> None:
    style = STYLES["phi"]
    tokenizer = tokenizer_of(style, executor)
    assert len(await controls(tokenizer, style, user("Hi"))) == 3
    assert len(await controls(tokenizer, style, {"role": "end", "content": "Hi"})) == 2


async def test_what_is_nested_too_deeply_is_refused(executor: ThreadPoolExecutor) -> None:
    value: Any = "x"
    for _ in range(900):
        value = [value]
    with pytest.raises(InvalidRequest, match="nested too deeply"):
        await encoded(tokenizer_of(STYLES["chatml"], executor), {**user("Hi"), "extra": value})


def test_many_tokens_that_begin_alike_are_found_in_linear_time() -> None:
    tokens = ControlTokens({f"<|reserved_{number}|>" for number in range(900)} | {"<|reserved_1"})
    assert tokens.starts is not None
    assert tokens.starts.sub("!", "<|reserved_899|> <|reserved_899 <|reserved_1x <") == (
        "!|reserved_899|> <|reserved_899 !|reserved_1x <"
    )
    text = "<|reserved_" * 100_000  # 5 s with one alternative for each token
    started = time.process_time()
    assert tokens.starts.sub("!", text) == text
    assert time.process_time() - started < 1
