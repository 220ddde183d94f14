"""Completions: prompts are texts or token ids, and choices are texts."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.apis.completions.render import CompletionAnswer
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.envelope import Envelope, Prompt
from proa_gateway.serving.prompt_text import encode_text
from proa_gateway.serving.refused_fields import REFUSED_IN_COMPLETIONS, Refused
from proa_gateway.serving.sampling import (
    check_max_tokens,
    check_token_ids,
    given,
    num_logprobs,
    sampling_params,
    text_stream,
    truncated,
)

DEFAULT_MAX_TOKENS = 16  # OpenAI's


class CompletionHandler:
    """The `EndpointHandler` of `/v1/completions`."""

    route: ClassVar[str] = "/v1/completions"
    operation: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = "cmpl-"
    prompt_param: ClassVar[str] = "prompt"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED_IN_COMPLETIONS

    def __init__(self, request: CompletionRequest) -> None:
        self.request = request
        self.num_prompts = len(request.prompt)

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self.request.extra_fields

    @property
    def session_id(self) -> str | None:
        return self.request.session_id or self.request.user

    def validate(self) -> None:
        request = self.request
        check_max_tokens(request.max_tokens, echo=bool(request.echo))
        num_choices = request.n or 1
        if (request.best_of or num_choices) != num_choices:
            raise InvalidRequest("best_of is only supported where it equals n.", param="best_of")

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        request = self.request
        return sampling_params(
            request,
            model,
            max_tokens=self._max_tokens,
            logprobs=num_logprobs("logprobs", request.logprobs, model.info),
            prompt_logprobs=given(request.prompt_logprobs, request.logprobs if request.echo else None),
        )

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        return [await self._tokenize(prompt, model) for prompt in self.request.prompt]

    def message_constraint(self, model: ServedModel, prompts: Sequence[Prompt]) -> None:
        return None

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> "CompletionAnswer":
        include_usage = self.request.include_usage
        envelope = Envelope(
            id=id, object="text_completion", created=created, model=model.name, include_usage=include_usage
        )
        return CompletionAnswer(self.request, envelope, model.tokenizer.vocabulary)

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        return None if self.request.max_tokens == 0 else text_stream(self.request, model, context=prompt.token_ids)

    @property
    def _max_tokens(self) -> int:
        """At least one token: an engine samples it even if only the prompt is scored."""
        return max(1, given(self.request.max_tokens, DEFAULT_MAX_TOKENS))

    async def _tokenize(self, prompt: str | list[int], model: ServedModel) -> Prompt:
        if isinstance(prompt, str):
            special = self.request.add_special_tokens is not False
            text = prompt
            token_ids = await encode_text(prompt, self.request, model, add_special_tokens=special, param="prompt")
        else:
            check_token_ids("prompt", prompt, model.info)
            text, token_ids = None, prompt
        kept = truncated(token_ids, self.request, model, max_tokens=self._max_tokens)
        if self.request.echo and (text is None or kept is not token_ids):
            text = await model.tokenizer.detokenize(kept)
        return Prompt(kept, text)
