"""The endpoints that `proa chat` and `proa complete` ask: the fields of requests, and the text in events."""

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol


def _read_stop(text: str) -> Any:
    """A text, or a list of texts in JSON."""
    return json.loads(text) if text.startswith("[") else text


# Fields of the requests of both endpoints, each with what reads it from a text and raises `ValueError`.
_FIELDS: Mapping[str, Callable[[str], Any]] = {
    "model": str,
    "temperature": float,
    "max_tokens": int,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "presence_penalty": float,
    "frequency_penalty": float,
    "repetition_penalty": float,
    "seed": int,
    "stop": _read_stop,
}


class Settings:
    """What all requests have, until it is changed. `values`: by name, the model's among them."""

    def __init__(self, readers: Mapping[str, Callable[[str], Any]], values: Mapping[str, Any]) -> None:
        """`readers`: what reads a setting from a text, by name. A value None is the server's default."""
        self._readers = readers
        self.values = {name: value for name, value in values.items() if value is not None}

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._readers)

    def set(self, name: str, text: str) -> None:
        """Change a setting; an empty text: the server's default. Raises `ValueError`."""
        name = name.replace("-", "_")
        if name not in self._readers:
            raise ValueError(f"there is no setting {name}, but {', '.join(self.names)}")
        if not text and name == "model":
            raise ValueError("name a model behind `/set model`")
        if not text:
            self.values.pop(name, None)
            return
        try:
            self.values[name] = self._readers[name](text)
        except ValueError:
            raise ValueError(f"{text} is not a value of {name}") from None


class Endpoint(Protocol):
    """An endpoint that generates text. `noun`: what it is asked with."""

    path: str
    noun: str
    readers: Mapping[str, Callable[[str], Any]]  # of its settings

    def body(self, text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        """The request's fields."""

    def read(self, choice: dict[str, Any]) -> tuple[str, str]:
        """The reasoning and the text of a choice of an event."""

    def keep(self, text: str, answer: str) -> None:
        """Add a question and its answer, which is not empty, to what later questions refer to."""

    def clear(self) -> None:
        """Forget what was kept."""


class Chat:
    """Chat completions. Each question is sent with the messages before it."""

    path = "/chat/completions"
    noun = "message"
    readers: Mapping[str, Callable[[str], Any]] = {**_FIELDS, "reasoning_effort": str, "system": str}

    def __init__(self) -> None:
        self._messages: list[dict[str, str]] = []

    def body(self, text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        fields = dict(settings)
        system = fields.pop("system", None)
        first = [] if system is None else [{"role": "system", "content": system}]
        return {**fields, "messages": [*first, *self._messages, {"role": "user", "content": text}]}

    def read(self, choice: dict[str, Any]) -> tuple[str, str]:
        delta = choice["delta"]
        return delta.get("reasoning") or delta.get("reasoning_content") or "", delta.get("content") or ""

    def keep(self, text: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]

    def clear(self) -> None:
        self._messages.clear()


class Completion:
    """Completions. Each prompt stands alone."""

    path = "/completions"
    noun = "prompt"
    readers = _FIELDS

    def body(self, text: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        return {**settings, "prompt": text}

    def read(self, choice: dict[str, Any]) -> tuple[str, str]:
        return "", choice.get("text") or ""

    def keep(self, text: str, answer: str) -> None:
        pass

    def clear(self) -> None:
        pass
