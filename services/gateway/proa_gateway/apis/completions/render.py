"""How the response of a completion looks."""

from collections.abc import Sequence
from typing import Any

import orjson

from proa.text import Vocabulary
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.errors import GatewayError
from proa_gateway.output.deltas import Delta
from proa_gateway.serving.answer import CollectedChoice, EventOutlet
from proa_gateway.serving.delta_sinks import ChoiceCollector, ChoiceStream
from proa_gateway.serving.envelope import Envelope, Prompt, Usage
from proa_gateway.serving.logprobs import CompletionLogprobs, TokenName, join
from proa_gateway.serving.rendering import _finish_fields, prompt_fields


class CompletionChoice:
    """A choice of `/v1/completions`. With `echo`, its text begins with the prompt."""

    def __init__(
        self,
        envelope: Envelope,
        index: int,
        prompt: Prompt,
        vocabulary: Vocabulary,
        *,
        echo: bool = False,
        logprobs: TokenName | None = None,
        prompt_logprobs: bool = False,
        token_ids: bool = False,
        skip_special_tokens: bool = True,
    ) -> None:
        """`logprobs`: the tokens' names in them, None: no log probabilities. `prompt_logprobs` and `token_ids`: whether
        the choice has these fields."""
        self._envelope = envelope
        self._index = index
        self._prompt = prompt
        self._vocabulary = vocabulary
        self._logprobs = None
        if logprobs is not None:
            self._logprobs = CompletionLogprobs(vocabulary, logprobs, skip_special_tokens=skip_special_tokens)
        self._prompt_logprobs = prompt_logprobs
        self._token_ids = token_ids
        self._sends_prompt_ids = token_ids  # in the first event
        self.begins_with_prompt = echo  # until the prompt is rendered
        self.text_head = envelope.event_head + b'{"index":%d,"text":' % index
        self.text_tail = b',"logprobs":null,"finish_reason":null}' + envelope.event_tail

    def opening(self, usage: Usage | None = None) -> bytes:
        return b""

    def event(self, delta: Delta, usage: Usage | None = None) -> bytes:
        choice = self._choice(delta)
        if self._sends_prompt_ids:
            self._sends_prompt_ids = False
            choice["prompt_token_ids"] = list(self._prompt.token_ids)
        return self._envelope.event(orjson.dumps(choice), usage)

    def final(self, delta: Delta) -> dict[str, Any]:
        fields = prompt_fields(
            self._prompt,
            delta.prompt_logprobs,
            self._vocabulary,
            logprobs=self._prompt_logprobs,
            token_ids=self._token_ids,
        )
        return {"token_ids": None, **self._choice(delta), **fields}

    def _choice(self, delta: Delta) -> dict[str, Any]:
        echo, self.begins_with_prompt = self.begins_with_prompt, False
        text = (self._prompt.text or "") + delta.text if echo else delta.text
        logprobs = self._render_logprobs(delta, echo=echo)
        choice = {"index": self._index, "text": text, "logprobs": logprobs, **_finish_fields(delta)}
        return choice | {"token_ids": delta.token_ids} if self._token_ids else choice

    def _render_logprobs(self, delta: Delta, *, echo: bool) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        if not echo:
            return self._logprobs.render(delta.logprobs)
        prompt = self._logprobs.render_prompt(self._prompt.token_ids, delta.prompt_logprobs)
        return join(prompt, self._logprobs.render(delta.logprobs))


class CompletionAnswer:
    """The `Answer` of `/v1/completions`. A response may have several prompts, so the fields about them are in the
    choices."""

    def __init__(self, request: CompletionRequest, envelope: Envelope, vocabulary: Vocabulary) -> None:
        self._request = request
        self._envelope = envelope
        self._vocabulary = vocabulary

    @property
    def wants_tokens(self) -> bool:
        request = self._request
        return request.logprobs is not None or bool(request.return_token_ids) or request.prompt_logprobs is not None

    def stream(self, index: int, prompt: Prompt, outlet: EventOutlet) -> ChoiceStream:
        return ChoiceStream(self._choice(index, prompt), outlet)

    def collect(self, index: int, prompt: Prompt) -> ChoiceCollector:
        return ChoiceCollector(self._choice(index, prompt))

    def last_events(self, usage: Usage) -> bytes:
        return self._envelope.last_events(usage)

    def error_events(self, error: GatewayError) -> bytes:
        return self._envelope.error_events(error)

    def body(self, choices: Sequence[CollectedChoice], usage: Usage) -> bytes:
        return self._envelope.response([choice.final() for choice in choices], usage)

    def _choice(self, index: int, prompt: Prompt) -> CompletionChoice:
        request = self._request
        return CompletionChoice(
            self._envelope,
            index,
            prompt,
            self._vocabulary,
            echo=bool(request.echo),
            logprobs=request.token_names(self._vocabulary) if request.logprobs is not None else None,
            prompt_logprobs=request.prompt_logprobs is not None,
            token_ids=bool(request.return_token_ids),
            skip_special_tokens=request.skip_special_tokens is not False,
        )
