"""A model that follows a script, with a tokenizer that has tokens for calls: its outputs and its prompts as text."""

import json
from collections.abc import Sequence
from typing import Any

from proa.engine.v1 import core_pb2
from support.chat import tool_tokenizer
from support.fake_engine import EOS, FakeEngine, Reply, prompt_ids, tokenizer_files
from support.strict_templates import STRICTEST

_TOOLS = "Tools:"
_RESULT = "</end>\n<tool>"
_TEMPLATE = "{% if tools %}" + _TOOLS + "{% for tool in tools %} {{ tool.function.name }}{% endfor %}\n{% endif %}"
_TOKENIZER = tool_tokenizer()


def scripted_engine(*turns: str, model: str = "fake") -> FakeEngine:
    """An engine whose model, with the strictest chat template, says `turns[n]` after n results of calls, and the last
    of them in a conversation without tools, such as one that asks for a title."""

    def reply(request: core_pb2.EngineCoreRequest) -> Reply:
        text = prompt_text(request)
        turn = turns[min(text.count(_RESULT), len(turns) - 1)] if text.startswith(_TOOLS) else turns[-1]
        return Reply([*_TOKENIZER.encode(turn).ids, EOS])

    files = tokenizer_files() | {
        "tokenizer.json": _TOKENIZER.to_str().encode(),
        "chat_template.jinja": (_TEMPLATE + STRICTEST).encode(),
    }
    return FakeEngine(script=reply, model_name=model, files=files, max_model_len=1_000_000, num_gpu_blocks=65_536)


def says(engine: FakeEngine, text: str) -> None:
    """The model's next outputs are this text, whose special tokens are tokens."""
    ids = _TOKENIZER.encode(text).ids
    engine.script = lambda request: Reply([*ids, EOS])


def call(tool: str, **arguments: Any) -> str:
    """A call as the model writes it; the gateway reads it with `tool_call_parser="hermes"`."""
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def prompt_text(request: core_pb2.EngineCoreRequest) -> str:
    return str(_TOKENIZER.decode(prompt_ids(request), skip_special_tokens=False))


def turns_with_tools(requests: Sequence[core_pb2.EngineCoreRequest]) -> list[str]:
    """The prompts of an agent's turns, without its other requests."""
    return [text for text in map(prompt_text, requests) if text.startswith(_TOOLS)]


def num_common(first: str, second: str) -> int:
    """The length of the common prefix."""
    differences = (index for index, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)
    return next(differences, min(len(first), len(second)))
