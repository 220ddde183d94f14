"""Shapes of conversations that clients send, agents among them. Each text is a word of its own."""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa.template_rules import EFFORTS

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Shape:
    """A body of chat completions without its model."""

    messages: Messages
    fields: Mapping[str, Any] = field(default_factory=dict)

    @property
    def words(self) -> list[str]:
        """The texts that the prompt must have, in their order. Templates may leave out reasoning. Results follow the
        calls of their message."""
        return [word for message in self.messages for word in words_of(message)]


def words_of(message: Mapping[str, Any]) -> Iterator[str]:
    content = message.get("content") or ()
    yield from [content] if isinstance(content, str) else (part["text"] for part in content)
    for call in message.get("tool_calls", ()):
        yield call["function"]["name"]
        yield call["function"]["arguments"].split('"')[3]


class _Words:
    """Makes messages of words that have not been used."""

    def __init__(self) -> None:
        self._numbers = itertools.count()

    def word(self) -> str:
        # No word is the beginning of another one.
        return f"w{next(self._numbers):03}x"

    def say(self, role: str, **fields: Any) -> dict[str, Any]:
        return {"role": role, "content": self.word(), **fields}

    def parts(self, role: str, count: int = 2) -> dict[str, Any]:
        return {"role": role, "content": [{"type": "text", "text": self.word()} for _ in range(count)]}

    def call(self, count: int = 1, **fields: Any) -> dict[str, Any]:
        """An assistant's message with calls and, unless `fields` have a content, null."""
        calls = []
        for _ in range(count):
            name, value = self.word(), self.word()
            function = {"name": name, "arguments": f'{{"key": "{value}"}}'}
            calls.append({"id": f"call_{name}{value}", "type": "function", "function": function})
        return {"role": "assistant", "content": None, **fields, "tool_calls": calls}

    def results(self, message: Mapping[str, Any]) -> Messages:
        return [self.say("tool", tool_call_id=call["id"]) for call in message["tool_calls"]]

    def round(self, count: int = 1, **fields: Any) -> Messages:
        """Calls and their results."""
        call = self.call(count, **fields)
        return [call, *self.results(call)]


def _roles(*roles: str) -> Callable[[_Words], Messages]:
    return lambda words: [words.say(role) for role in roles]


def _rounds(words: _Words) -> Messages:
    turns = [[words.say("user"), *words.round(), words.say("assistant")] for _ in range(20)]
    return [*itertools.chain.from_iterable(turns), words.say("user")]


def _agent(*roles: str) -> Callable[[_Words], Messages]:
    """The first request of a coding agent, whose first user's message has its surroundings."""
    return lambda words: [*(words.say(role) for role in roles), words.parts("user"), words.say("user")]


def _agent_after_calls(*roles: str, later: Sequence[str]) -> Callable[[_Words], Messages]:
    def make(words: _Words) -> Messages:
        text = words.word()
        return [
            *_agent(*roles)(words),
            *words.round(2, content=text, reasoning_content=words.word()),
            *words.round(),
            *(words.say(role) for role in later),
        ]

    return make


_SHAPES: Mapping[str, Callable[[_Words], Messages]] = {
    "user": _roles("user"),
    "system and user": _roles("system", "user"),
    "system alone": _roles("system"),
    "two systems": _roles("system", "system", "user"),
    "system and two developers": _roles("system", "developer", "developer", "user"),
    "system at the end": _roles("system", "user", "system"),
    "system between": _roles("system", "user", "system", "user"),
    "system after an answer": _roles("system", "user", "assistant", "system", "user"),
    "system after a result": lambda w: [*_roles("system", "user")(w), *w.round(), w.say("system")],
    "no system first": _roles("user", "system", "user"),
    "two users": _roles("user", "user"),
    "two users later": _roles("user", "assistant", "user", "user"),
    "two answers": _roles("user", "assistant", "assistant", "user"),
    "assistant first": _roles("assistant", "user"),
    "null and a call": lambda w: [w.say("user"), *w.round()],
    "empty text and a call": lambda w: [w.say("user"), *w.round(content="")],
    "text beside a call": lambda w: [w.say("user"), *w.round(content=w.word())],
    "text before a call": lambda w: [w.say("user"), w.say("assistant"), *w.round()],
    "reasoning, text and a call": lambda w: [w.say("user"), *w.round(content=w.word(), reasoning=w.word())],
    "two calls": lambda w: [w.say("user"), *w.round(2)],
    "two calls and text": lambda w: [w.say("user"), *w.round(2, content=w.word()), w.say("user")],
    "user after a result": lambda w: [w.say("user"), *w.round(), w.say("user")],
    "open call": lambda w: [w.say("user"), w.call(), w.say("user")],
    "twenty turns": _rounds,
    "parts of user and system": lambda w: [w.parts("system"), w.parts("user")],
    "parts of the assistant": lambda w: [w.say("user"), w.parts("assistant"), w.say("user")],
    "codex first": _agent("system", "developer", "developer"),
    "codex after calls": _agent_after_calls("system", "developer", "developer", later=["user"]),
    "claude code first": lambda w: [*_agent("system")(w), w.say("system")],
    "claude code after calls": _agent_after_calls("system", later=["system"]),
}
_ENDS = {"add_generation_prompt": False, "continue_final_message": True}


def shapes() -> dict[str, Shape]:
    """All 41 shapes by name."""
    made = {name: Shape(make(_Words())) for name, make in _SHAPES.items()}
    words = _Words()
    made["prefill"] = Shape(_roles("user", "assistant")(words), _ENDS)
    made["prefill after a result"] = Shape([words.say("user"), *words.round(), words.say("assistant")], _ENDS)
    for effort in EFFORTS:
        made[f"effort {effort}"] = Shape(_roles("user")(words), {"reasoning_effort": effort})
    for is_on in (True, False):
        kwargs = {"enable_thinking": is_on, "thinking": is_on}
        made[f"thinking {is_on}"] = Shape(_roles("system", "user")(words), {"chat_template_kwargs": kwargs})
    return made
