"""How the response of a completion looks."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from proa.text import Vocabulary
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.engines.models import ServedModel
from proa_gateway.output.text import Delta
from proa_gateway.parsing.events import ContentDelta, MessageEvent
from proa_gateway.serving.choices import Output, Prompt, Usage
from proa_gateway.serving.envelope import Envelope, prompt_fields
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.logprobs import CompletionLogprobs, TokenName, join


@dataclass(frozen=True, slots=True)
class CompletionForm:
    """What all choices of a response share. `names`: what tokens are called in log probabilities; None: there are
    none."""

    body: CompletionRequest
    vocabulary: Vocabulary
    names: TokenName | None
    envelope: Envelope


class TextChoice:
    """Renders one choice. With `echo`, the choice's text begins with the prompt."""

    def __init__(self, form: CompletionForm, index: int, prompt: Prompt) -> None:
        body, envelope = form.body, form.envelope
        self._body = body
        self._vocabulary = form.vocabulary
        self._envelope = envelope
        self._index = index
        self._prompt = prompt
        self._logprobs = None  # None: not requested
        if form.names is not None:
            skips = body.skip_special_tokens is not False
            self._logprobs = CompletionLogprobs(form.vocabulary, form.names, skip_special_tokens=skips)
        self._is_first = True  # no event was rendered yet
        self._frame = (  # of all texts but an echoed first one
            envelope.event_head() + b'{"index":%d,"text":' % index,
            b',"logprobs":null,"finish_reason":null}' + envelope.event_tail(),
        )

    @property
    def text_frame(self) -> tuple[bytes, bytes] | None:
        return None if self._is_first and self._body.echo else self._frame

    def opening(self, usage: Usage) -> bytes:
        return b""

    def event(self, events: Sequence[MessageEvent], delta: Delta, usage: Usage | None) -> bytes:
        choice = self._choice(events, delta)
        if self._is_first and self._body.return_token_ids:
            choice["prompt_token_ids"] = list(self._prompt.token_ids)
        self._is_first = False
        return self._envelope.event(orjson.dumps(choice), usage)

    def final(self, output: Output) -> dict[str, Any]:
        fields = prompt_fields(
            self._prompt,
            output.delta.prompt_logprobs,
            self._vocabulary,
            logprobs=self._body.prompt_logprobs is not None,
            token_ids=bool(self._body.return_token_ids),
        )
        return {"token_ids": None, **self._choice(output.events, output.delta), **fields}

    def _choice(self, events: Sequence[MessageEvent], delta: Delta) -> dict[str, Any]:
        echo = self._is_first and bool(self._body.echo)
        text = "".join(event.text for event in events if isinstance(event, ContentDelta))
        choice: dict[str, Any] = {
            "index": self._index,
            "text": (self._prompt.text or "") + text if echo else text,
            "logprobs": self._render_logprobs(delta, echo=echo),
            "finish_reason": delta.finish_reason,
        }
        if delta.finish_reason is not None:
            choice["stop_reason"] = delta.stop_reason
        return choice | {"token_ids": delta.token_ids} if self._body.return_token_ids else choice

    def _render_logprobs(self, delta: Delta, *, echo: bool) -> dict[str, list[Any]] | None:
        if self._logprobs is None:
            return None
        if not echo:
            return self._logprobs.render(delta.logprobs)
        prompt = self._logprobs.render_prompt(self._prompt.token_ids, delta.prompt_logprobs)
        return join(prompt, self._logprobs.render(delta.logprobs))


class CompletionRenderer:
    """The `Renderer` of completions. There may be several prompts, so the fields about them are in the choices."""

    follows_output = False

    def __init__(
        self, body: CompletionRequest, model: ServedModel, settings: ApiSettings, id: str, created: int
    ) -> None:
        usage = settings.includes_usage or body.include_usage
        self._envelope = Envelope(
            id=id, object="text_completion", created=created, model=model.name, include_usage=usage
        )
        vocabulary = model.tokenizer.vocabulary
        names = None
        if body.logprobs is not None:
            names = body.token_names(vocabulary, as_ids=settings.tokens_as_ids, shows_bytes=True)
        self._form = CompletionForm(body, vocabulary, names, self._envelope)
        self.wants_tokens = body.logprobs is not None or bool(body.return_token_ids) or body.prompt_logprobs is not None
        self.last_events, self.error_events = self._envelope.last_events, self._envelope.error_events

    def choice(self, index: int, prompt: Prompt) -> TextChoice:
        return TextChoice(self._form, index, prompt)

    def body(self, outputs: Sequence[Output], usage: Usage) -> bytes:
        finals = [self.choice(index, each.prompt).final(each) for index, each in enumerate(outputs)]
        return self._envelope.response(finals, usage)
