"""What engines get for a request to `/generate`."""

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from proa.contract import SamplingParams
from proa.text import TextStream
from proa_gateway.apis.generate.protocol import REFUSED, GenerateBody, SamplingFields
from proa_gateway.apis.generate.render import GenerateAnswer, GenerateForm, LogprobForm
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.serving.envelope import Prompt
from proa_gateway.serving.generation_request import GenerationRequest
from proa_gateway.serving.prompt_text import check_text_fits
from proa_gateway.serving.refused_fields import Refused
from proa_gateway.serving.sampling import check_token_ids, num_logprobs, sampling_params, text_stream

_NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output"}
"""Sampling parameters that `GenerationRequest` has by another name."""
_LOCAL = frozenset({"max_new_tokens", "spaces_between_special_tokens"})


class GenerateHandler:
    route: ClassVar[str] = "/generate"
    operation: ClassVar[str] = "text_completion"
    id_prefix: ClassVar[str] = ""
    prompt_param: ClassVar[str] = "text"
    refused: ClassVar[Mapping[str, Refused]] = REFUSED

    def __init__(self, body: GenerateBody) -> None:
        self._body = body
        self._arrived = time.perf_counter()
        self.request = generation_request(body)
        self.num_prompts = len(body.prompts)

    @property
    def extra_fields(self) -> Mapping[str, Any]:
        return self._body.extra_fields

    @property
    def session_id(self) -> str | None:
        return self._body.session_id

    def validate(self) -> None:
        pass

    def sampling_params(self, model: ServedModel) -> list[SamplingParams]:
        body, limit = self._body, self._body.sampling_params.max_new_tokens
        count = num_logprobs("top_logprobs_num", body.top_logprobs_num, model.info) if body.return_logprob else None
        return sampling_params(
            self.request,
            model,
            max_tokens=None if limit is None else max(1, limit),  # an engine samples a token to score a prompt
            logprobs=count,
            prompt_logprobs=count if body.logprob_start_len >= 0 else None,
        )

    async def tokenize(self, model: ServedModel) -> list[Prompt]:
        return [await _tokenize(prompt, model) for prompt in self._body.prompts]

    def message_constraint(self, model: ServedModel, prompts: Sequence[Prompt]) -> None:
        return None

    def answer(self, id: str, created: int, model: ServedModel, prompts: Sequence[Prompt]) -> GenerateAnswer:
        body = self._body
        logprobs = None
        if body.return_logprob:
            has_tops = body.top_logprobs_num > 0
            logprobs = LogprobForm(model.tokenizer.vocabulary, body.return_text_in_logprobs, has_tops)
        form = GenerateForm(
            arrived=self._arrived,
            eos_token_ids=frozenset(model.info.eos_token_ids),
            logprobs=logprobs,
            prompt_start=body.logprob_start_len if body.logprob_start_len >= 0 else None,
        )
        num_choices = self.request.n or 1
        return GenerateAnswer(form, _ids(body, id, num_choices), is_batch=body.is_batch or num_choices > 1)

    def text_stream(self, prompt: Prompt, model: ServedModel) -> TextStream | None:
        if self._body.sampling_params.max_new_tokens == 0:
            return None
        return text_stream(self.request, model, context=prompt.token_ids)


def generation_request(body: GenerateBody) -> GenerationRequest:
    """The sampling parameters and the constraint of the output, by OpenAI's names."""
    names = SamplingFields.model_fields.keys() - _LOCAL
    given = {name: value for name in names if (value := getattr(body.sampling_params, name)) is not None}
    fields = {_NAMES.get(name, name): value for name, value in given.items()}
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token_id): bias for token_id, bias in fields["logit_bias"].items()}  # as in JSON
    if body.priority is not None:
        fields["priority"] = -body.priority  # here, smaller ones are served first
    if isinstance(body.rid, str):
        fields["request_id"] = body.rid
    fields |= {"model": body.lora_path or body.model, "stream": body.stream, "cache_salt": body.cache_salt}
    return GenerationRequest.model_validate(fields)


async def _tokenize(prompt: str | list[int], model: ServedModel) -> Prompt:
    if isinstance(prompt, str):
        await check_text_fits(prompt, model, model.info.max_model_len, "text")
        return Prompt(await model.tokenizer.encode(prompt, add_special_tokens=True), prompt)
    check_token_ids("input_ids", prompt, model.info)
    return Prompt(prompt)


def _ids(body: GenerateBody, id: str, num_choices: int) -> list[str]:
    """An id for each choice of each prompt. `id`: the request's."""
    match body.rid:
        case list(rids):
            ids = rids
        case rid:
            first = id if rid is None else rid
            ids = [f"{first}_{index}" for index in range(len(body.prompts))] if body.is_batch else [first]
    return [f"{each}_{choice}" if num_choices > 1 else each for each in ids for choice in range(num_choices)]
