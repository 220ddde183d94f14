"""Completions: prompts are texts or token ids, and choices are texts."""

from dataclasses import dataclass
from functools import partial

from proa.contract import PromptEmbeds
from proa_gateway.apis.completions.protocol import CompletionRequest
from proa_gateway.apis.completions.render import CompletionRenderer
from proa_gateway.engines.models import ServedModel
from proa_gateway.serving.beam_search import beam_search_job
from proa_gateway.serving.choices import Prompt
from proa_gateway.serving.constraints import OutputConstraint
from proa_gateway.serving.generation_job import GenerationCall, GenerationJob
from proa_gateway.serving.generation_request import check_token_ids, given, num_logprobs, sampling_params, text_stream
from proa_gateway.serving.ignored_fields import REFUSED_IN_COMPLETIONS
from proa_gateway.serving.job import ApiSettings, Endpoint
from proa_gateway.serving.prompt import encode_text, truncated
from proa_gateway.serving.prompt_embeds import read_prompt_embeds

DEFAULT_MAX_TOKENS = 16  # OpenAI's
COMPLETIONS = Endpoint("/v1/completions", "text_completion", "cmpl-", REFUSED_IN_COMPLETIONS)


def completion_call(body: CompletionRequest, settings: ApiSettings) -> "CompletionCall":
    return CompletionCall(
        endpoint=COMPLETIONS,
        fields=body,
        session_id=body.session_id or body.user,
        extra_fields=body.extra_fields,
        settings=settings,
        num_prompts=len(body.texts) + len(body.prompt_embeds or ()),
    )


@dataclass(frozen=True, kw_only=True)
class CompletionCall(GenerationCall):
    fields: CompletionRequest

    async def prepare(self, model: ServedModel) -> GenerationJob:
        body, settings = self.fields, self.settings
        # An engine samples a token even if only the prompt is scored.
        max_tokens = max(1, given(body.max_tokens, DEFAULT_MAX_TOKENS))
        params = sampling_params(
            body,
            model,
            max_tokens=max_tokens,
            logprobs=num_logprobs("logprobs", body.logprobs, model.info),
            prompt_logprobs=given(body.prompt_logprobs, body.logprobs if body.echo else None),
        )
        embedded = [_embedded(embeds) for embeds in await read_prompt_embeds(body.prompt_embeds or (), model)]
        only_scores = body.max_tokens == 0
        job = GenerationJob(
            request=body,
            param="prompt",
            prompts=[*embedded, *[await _read(prompt, body, model, max_tokens) for prompt in body.texts]],
            constraint=OutputConstraint(body.constraint) if body.constraint is not None else None,
            params=params,
            text_stream=lambda each: None if only_scores else text_stream(body, model, context=each.text_token_ids),
            renderer=partial(CompletionRenderer, body, model, settings),
            continuous_usage=settings.includes_usage or body.continuous_usage,
        )
        return beam_search_job(job, body, model) if body.use_beam_search else job


def _embedded(embeds: PromptEmbeds) -> Prompt:
    return Prompt([0] * embeds.num_tokens, embeds=(embeds,))


async def _read(prompt: str | list[int], body: CompletionRequest, model: ServedModel, max_tokens: int) -> Prompt:
    if isinstance(prompt, str):
        special = body.add_special_tokens is not False
        text: str | None = prompt
        token_ids = await encode_text(prompt, body, model, add_special_tokens=special, param="prompt")
    else:
        check_token_ids("prompt", prompt, model.info)
        text, token_ids = None, prompt
    kept = truncated(token_ids, body, model, max_tokens=max_tokens)
    if body.echo and (text is None or kept is not token_ids):
        text = await model.tokenizer.detokenize(kept)
    return Prompt(kept, text)
