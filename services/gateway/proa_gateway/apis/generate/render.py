"""How the response of `/generate` looks. Every event has the whole output so far, as in SGLang."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.errors import GatewayError
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import ContentDelta, MessageEvent
from proa_gateway.serving.choices import Output, Prompt, Usage
from proa_gateway.serving.logprobs import finite

_DONE = b"data: [DONE]\n\n"
Entry = list[Any]
"""Log probability, token id, text or null."""


@dataclass(frozen=True, slots=True)
class LogprobForm:
    """How log probabilities look. `has_text`: entries have the tokens' texts. `has_tops`: the likeliest are listed."""

    vocabulary: Vocabulary
    has_text: bool
    has_tops: bool

    def entry(self, logprob: float | None, token_id: int) -> Entry:
        text = self.vocabulary.token_bytes(token_id).decode(errors="replace") if self.has_text else None
        return [None if logprob is None else finite(logprob), token_id, text]

    def entries(self, tokens: Sequence[TokenLogprobs]) -> list[Entry]:
        return [self.entry(token.logprob, token.token_id) for token in tokens]

    def tops(self, tokens: Sequence[TokenLogprobs]) -> list[list[Entry]]:
        pairs = (zip(token.top_logprobs, token.top_token_ids, strict=True) for token in tokens)
        return [[self.entry(logprob, token_id) for logprob, token_id in each] for each in pairs]


@dataclass(frozen=True, slots=True)
class GenerateForm:
    """What all choices of a response share. `arrived`: the request's arrival, by `time.perf_counter`. `logprobs`: None:
    there are none. `prompt_start`: position from which the prompt's log probabilities are listed; None: they are not.
    `is_batch`: the response is a list, events have an index."""

    arrived: float
    eos_token_ids: frozenset[int]  # one that ended an output is named in the response
    logprobs: LogprobForm | None = None
    prompt_start: int | None = None
    is_batch: bool = False


class GenerateChoice:
    """One choice of one prompt."""

    text_frame = None  # every delta has token ids, so `event` renders all

    def __init__(self, form: GenerateForm, prompt: Prompt, id: str, index: int) -> None:
        self._form = form
        self._prompt = prompt
        self._id = id
        self._index = {"index": index} if form.is_batch else {}
        self._text = ""  # so far, like all below
        self._token_ids: list[int] = []
        self._lists: dict[str, list[Any]] = {}  # of log probabilities, by their field

    def opening(self, usage: Usage) -> bytes:
        return b""

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        return b"data: " + orjson.dumps(self.add(events, delta) | self._index) + b"\n\n"

    def add(self, events: Sequence[MessageEvent], delta: Delta) -> dict[str, Any]:
        """The whole output so far, with these."""
        self._text += "".join(event.text for event in events if isinstance(event, ContentDelta))
        self._token_ids += delta.token_ids
        self._add_logprobs(delta)
        meta: dict[str, Any] = {
            "id": self._id,
            "finish_reason": self._finish_reason(delta),
            "prompt_tokens": len(self._prompt.token_ids),
            "completion_tokens": len(self._token_ids),
            "cached_tokens": delta.num_cached_tokens,
            **self._lists,
        }
        if delta.finish_reason is not None:
            meta["e2e_latency"] = time.perf_counter() - self._form.arrived
        return {"text": self._text, "output_ids": self._token_ids, "meta_info": meta}

    def _finish_reason(self, delta: Delta) -> dict[str, Any] | None:
        match delta.finish_reason:
            case None:
                return None
            case "length":
                return {"type": "length", "length": len(self._token_ids)}
            case "stop":
                return {"type": "stop", "matched": self._matched(delta)}
            case other:
                return {"type": other}

    def _matched(self, delta: Delta) -> int | str | None:
        """The stop string or token. None: the output matches its grammar."""
        if delta.stop_reason is not None or not self._token_ids:
            return delta.stop_reason
        last = self._token_ids[-1]
        return last if last in self._form.eos_token_ids else None

    def _add_logprobs(self, delta: Delta) -> None:
        form = self._form.logprobs
        if form is None:
            return
        if not self._lists:
            self._lists = {"input_token_logprobs": self._prompt_entries(form, delta), "output_token_logprobs": []}
            if form.has_tops:
                self._lists |= {"input_top_logprobs": self._prompt_tops(form, delta), "output_top_logprobs": []}
        self._lists["output_token_logprobs"] += form.entries(delta.logprobs)
        if form.has_tops:
            self._lists["output_top_logprobs"] += form.tops(delta.logprobs)

    def _prompt_entries(self, form: LogprobForm, delta: Delta) -> list[Entry]:
        """Entries of the prompt's tokens from `prompt_start` on. The first entry has no log probability."""
        start, ids = self._form.prompt_start, self._prompt.token_ids
        if start is None or start >= len(ids):
            return []
        return [form.entry(None, ids[start]), *form.entries(delta.prompt_logprobs[start:])]

    def _prompt_tops(self, form: LogprobForm, delta: Delta) -> list[list[Entry] | None]:
        start = self._form.prompt_start
        if start is None or start >= len(self._prompt.token_ids):
            return []
        return [None, *form.tops(delta.prompt_logprobs[start:])]


class GenerateRenderer:
    """The `Renderer` of `/generate`: one object, or a list with one for each choice of a batch."""

    follows_output = False
    wants_tokens = True

    def __init__(self, form: GenerateForm, choice_ids: Callable[[str], Sequence[str]], id: str, created: int) -> None:
        """`choice_ids`: returns an id for each choice, from the request's."""
        self._form = form
        self._ids = choice_ids(id)  # one for each choice

    def choice(self, index: int, prompt: Prompt) -> GenerateChoice:
        return GenerateChoice(self._form, prompt, self._ids[index], index)

    def last_events(self, usage: Usage) -> bytes:
        return _DONE

    def error_events(self, error: GatewayError) -> bytes:
        return b"data: " + orjson.dumps(error.to_dict()) + b"\n\n" + _DONE

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        finals = [self.choice(index, each.prompt).add(each.events, each.delta) for index, each in enumerate(outputs)]
        return orjson.dumps(finals if self._form.is_batch else finals[0])
