"""What engines get for a request to `/generate`."""

import time
from dataclasses import dataclass
from functools import partial
from itertools import product

from proa_gateway.apis.generate.protocol import REFUSED, GenerateBody, SamplingFields
from proa_gateway.apis.generate.render import GenerateForm, GenerateRenderer, LogprobForm
from proa_gateway.engines.models import ServedModel
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.constraints import OutputConstraint
from proa_gateway.serving.generation_job import GenerationCall, GenerationJob
from proa_gateway.serving.generation_request import (
    GenerationRequest,
    check_token_ids,
    num_logprobs,
    sampling_params,
    text_stream,
)
from proa_gateway.serving.job import ApiSettings, Endpoint
from proa_gateway.serving.prompt import check_text_fits

GENERATE = Endpoint("/generate", "text_completion", "", REFUSED)
_NAMES = {"min_new_tokens": "min_tokens", "sampling_seed": "seed", "no_stop_trim": "include_stop_str_in_output"}
"""Sampling parameters that `GenerationRequest` has by another name."""
_LOCAL = frozenset({"max_new_tokens", "spaces_between_special_tokens"})


def generate_call(body: GenerateBody, settings: ApiSettings) -> "GenerateCall":
    return GenerateCall(
        endpoint=GENERATE,
        fields=generation_request(body),
        body=body,
        session_id=body.session_id,
        extra_fields=body.extra_fields,
        settings=settings,
        num_prompts=len(body.prompts),
        arrived=time.perf_counter(),
    )


@dataclass(frozen=True, kw_only=True)
class GenerateCall(GenerationCall):
    """A request to `/generate`. `arrived`: its arrival, by `time.perf_counter`."""

    body: GenerateBody
    arrived: float

    async def prepare(self, model: ServedModel) -> GenerationJob:
        body, request, limit = self.body, self.fields, self.body.sampling_params.max_new_tokens
        prompt_start = body.logprob_start_len if body.logprob_start_len >= 0 else None
        count = num_logprobs("top_logprobs_num", body.top_logprobs_num, model.info) if body.return_logprob else None
        params = sampling_params(
            request,
            model,
            max_tokens=None if limit is None else max(1, limit),  # an engine samples a token to score a prompt
            logprobs=count,
            prompt_logprobs=count if prompt_start is not None else None,
        )
        logprobs = None
        if body.return_logprob:
            has_tops = body.top_logprobs_num > 0
            logprobs = LogprobForm(model.tokenizer.vocabulary, body.return_text_in_logprobs, has_tops)
        form = GenerateForm(
            arrived=self.arrived,
            eos_token_ids=frozenset(model.info.eos_token_ids),
            logprobs=logprobs,
            prompt_start=prompt_start,
            is_batch=body.is_batch or self.num_choices > 1,
        )
        return GenerationJob(
            request=request,
            param="text",
            prompts=[await _read(prompt, model) for prompt in body.prompts],
            constraint=OutputConstraint(request.constraint) if request.constraint is not None else None,
            params=params,
            text_stream=lambda each: None if limit == 0 else text_stream(request, model, context=each.token_ids),
            renderer=partial(GenerateRenderer, form, partial(choice_ids, body, self.num_choices)),
        )


def generation_request(body: GenerateBody) -> GenerationRequest:
    """Return the sampling parameters and the constraint of the output under OpenAI's names."""
    names = SamplingFields.model_fields.keys() - _LOCAL
    given = {name: value for name in names if (value := getattr(body.sampling_params, name)) is not None}
    fields = {_NAMES.get(name, name): value for name, value in given.items()}
    if body.priority is not None:
        fields["priority"] = -body.priority  # here, smaller ones are served first
    if isinstance(body.rid, str):
        fields["request_id"] = body.rid
    fields |= {"model": body.lora_path or body.model, "stream": body.stream, "cache_salt": body.cache_salt}
    return GenerationRequest.model_construct(**fields)


async def _read(prompt: str | list[int], model: ServedModel) -> Prompt:
    if isinstance(prompt, str):
        await check_text_fits(prompt, model, model.info.max_model_len, "text")
        return Prompt(await model.tokenizer.encode(prompt, add_special_tokens=True), prompt)
    check_token_ids("input_ids", prompt, model.info)
    return Prompt(prompt)


def choice_ids(body: GenerateBody, num_choices: int, id: str) -> list[str]:
    """Return an id for each choice of each prompt. `id`: the request's id."""
    match body.rid:
        case list(rids):
            ids = rids
        case rid:
            first = id if rid is None else rid
            ids = [f"{first}_{index}" for index in range(len(body.prompts))] if body.is_batch else [first]
    return [f"{each}_{choice}" for each, choice in product(ids, range(num_choices))] if num_choices > 1 else ids
