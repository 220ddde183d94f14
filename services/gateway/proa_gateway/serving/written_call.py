"""WrittenCall: the call that a chat template writes in a history, which is how its model was trained to write calls."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from proa.chat_template import ChatTemplate, ChatTemplateError
from proa.template_budget import Budget
from proa.template_rules import messages_as_read
from proa_gateway.parsing.compiled_format import compile_format
from proa_gateway.parsing.events import ArgumentsDelta, CallStarted, MessageEvent
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.parser import ResponseParser
from proa_gateway.serving.chat_prompt import num_common, template_messages
from proa_gateway.serving.conversation import ChatMessage
from proa_gateway.tokenizer import Tokenizer

_NAME: Final = "lookup"
_ARGUMENTS: Final = {"key": "x", "n": 3}
_PARAMETERS: Final = {"type": "object", "properties": {"key": {"type": "string"}, "n": {"type": "integer"}}}
_TOOL: Final = {"type": "function", "function": {"name": _NAME, "description": "Find it.", "parameters": _PARAMETERS}}
_USER: Final = {"role": "user", "content": "Find it."}
_CALL: Final = {"id": "abcdefghi", "type": "function", "function": {"name": _NAME, "arguments": _ARGUMENTS}}
_RESULT: Final = {"role": "tool", "tool_call_id": "abcdefghi", "content": "found"}
_MAX_OPENING: Final = 100  # characters of the generation prompt with which a call may begin
_MAY_OPEN: Final = re.compile(r"[<\[{(]")


@dataclass(frozen=True, slots=True)
class WrittenCall:
    """`text`: a prompt whose last message is the call. `start`: where it is no longer the prompt of an answer."""

    text: str
    start: int
    added_tokens: Mapping[str, int]  # the tokenizer's, id by text

    def is_read_by(self, tool_format: ToolFormat) -> bool:
        """Whether the format reads the call, and its arguments exactly."""
        return any(self._is_read_from(start, tool_format) for start in self._starts())

    def _starts(self) -> Iterator[int]:
        """Where the model's output may begin. The generation prompt may end with characters that calls begin with."""
        yield self.start
        first = max(0, self.start - _MAX_OPENING)
        for opening in reversed(list(_MAY_OPEN.finditer(self.text, first, self.start))):
            yield opening.start()

    def _is_read_from(self, start: int, tool_format: ToolFormat) -> bool:
        compiled = compile_format(tool_format, self.added_tokens, calls=True)
        ids = {text: token_id for token_id, text in compiled.markers.items() if text in self.text}
        parser = ResponseParser(compiled, {_NAME: _PARAMETERS}, reasoning_open=False)
        tokens = "|".join(map(re.escape, sorted(ids, key=len, reverse=True)))
        events: list[MessageEvent] = []
        for part in re.split(f"({tokens})", self.text[start:]) if tokens else [self.text[start:]]:
            events += parser.marker(ids[part]) if part in ids else parser.text(part)
        events += parser.finish()
        names = [event.name for event in events if isinstance(event, CallStarted)]
        arguments = "".join(event.text for event in events if isinstance(event, ArgumentsDelta))
        return names == [_NAME] and _json(arguments) == _ARGUMENTS


def written_call(tokenizer: Tokenizer) -> WrittenCall | None:
    """Return the call that the tokenizer's chat template writes. None: it has none, or it refuses calls or leaves them
    out."""
    template = tokenizer.template_for(tools=True)
    if template is None or "tools" not in template.variables:
        return None
    prompt = _render(template, [_USER], add_generation_prompt=True)
    for content in (None, ""):  # some templates read the content of every message
        for after in ([], [_RESULT]):  # some refuse a call without its result
            call = {"role": "assistant", "content": content, "tool_calls": [_CALL]}
            text = _render(template, [_USER, call, *after], add_generation_prompt=False)
            start = num_common(prompt, text)
            if _NAME in text[start:]:
                return WrittenCall(text, start, tokenizer.added_tokens)
    return None


def _render(template: ChatTemplate, messages: Sequence[Mapping[str, object]], *, add_generation_prompt: bool) -> str:
    """The prompt. Empty: the template refuses the messages."""
    chat = template_messages([ChatMessage.model_validate(message) for message in messages])
    rendered = messages_as_read(chat, template.content_forms, keeps_null=template.tests_none)
    try:
        return template.render(
            rendered, {"tools": [_TOOL]}, add_generation_prompt=add_generation_prompt, budget=Budget()
        )
    except ChatTemplateError:
        return ""


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
