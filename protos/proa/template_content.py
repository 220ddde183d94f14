"""How a chat template reads the contents of messages: as text, as lists of parts, or as either.

Found by rendering short conversations with both, so it does not depend on how a template is written. vLLM looks for
loops over `message.content` in its syntax tree (`--chat-template-content-format auto`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = Sequence[Mapping[str, Any]]
Content = str | Sequence[Mapping[str, Any]]

_WORDS = ("proawordone", "proawordtwo")
_CALL = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}


@dataclass(frozen=True, slots=True)
class ContentForms:
    """The forms of a message's content that a template reads. `parts`: objects with a `type`, texts `{"type": "text",
    "text": …}` among them."""

    text: bool
    parts: bool


TEXT = ContentForms(text=True, parts=False)
PARTS = ContentForms(text=False, parts=True)


def content_forms(render: Callable[[Messages], str]) -> dict[str, ContentForms]:
    """By role. A role whose messages the template refuses, or leaves out, has text.

    `render` may raise any `ValueError`.
    """
    user = _forms(render, lambda content: [{"role": "user", "content": content}])
    question = {"role": "user", "content": text_part("question") if user == PARTS else "question"}
    call = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
    result = {"role": "tool", "tool_call_id": "abcdefghi", "name": "f"}
    return {
        "user": user,
        "system": _forms(render, lambda content: [{"role": "system", "content": content}, question]),
        "assistant": _forms(render, lambda content: [question, {"role": "assistant", "content": content}, question]),
        "tool": _forms(render, lambda content: [question, call, {**result, "content": content}]),
    }


def text_part(text: str) -> list[dict[str, str]]:
    """A list of one part."""
    return [{"type": "text", "text": text}]


def _forms(render: Callable[[Messages], str], messages: Callable[[Content], Messages]) -> ContentForms:
    def rendered(content: Content) -> str:
        try:
            return render(messages(content))
        except ValueError:
            return ""

    text = _WORDS[0] in rendered(_WORDS[0])
    written = rendered([part for word in _WORDS for part in text_part(word)])
    # A template that takes every content for text writes the list as Python or as JSON.
    parts = all(word in written and f"{word}'" not in written and f'{word}"' not in written for word in _WORDS)
    return ContentForms(text=text or not parts, parts=parts)
