"""Made-up steps in the form that the scheduler sends: prefills, decodes and ends of requests that no client sent."""

from collections.abc import Mapping, Sequence
from dataclasses import replace

from proa.contract import AudioInput, ImageInput, PoolingParams, PoolingTask, SamplingParams
from proa.contract.audio import SAMPLE_BYTES
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.types import (
    BASE_MODEL,
    NO_STATE,
    CachedRequestData,
    CrossInput,
    EncodedAudio,
    EncoderInput,
    LoraSlot,
    MediaSpan,
    NewRequestData,
    SchedulerOutput,
    StateSteps,
)
from proa_engine.models.pooling_config import PoolingConfig

GREEDY = SamplingParams(temperature=0.0)
FIRST_TOKENS = 16  # of a short prompt
MEDIA_HASH = b"warm-up"


def pooling_examples(config: PoolingConfig) -> list[PoolingParams]:
    """Return parameters of a pooled request for each of the model's tasks."""
    return [
        PoolingParams(task=task, score_token_ids=(0,) if task is PoolingTask.TOKEN_LOGPROBS else ())
        for task in config.kinds
    ]


def prefill_step(
    lengths: Sequence[int],
    groups: CacheGroups,
    params: SamplingParams | PoolingParams = GREEDY,
    lora: LoraSlot = BASE_MODEL,
) -> SchedulerOutput:
    """Return a step of new prompts of these lengths, with ids warm-up-0, warm-up-1, …

    All share the same blocks, and one prompt may have a block more than once: what they write is never read.
    """
    tables = range(groups.num_tables)
    requests = [
        NewRequestData(
            request_id=f"warm-up-{index}",
            token_ids=[0] * length,
            num_prompt_tokens=length,
            num_computed_tokens=0,
            block_ids=[_blocks(length + 1, groups) for _ in tables],
            sampling_params=params if isinstance(params, SamplingParams) else GREEDY,
            pooling_params=params if isinstance(params, PoolingParams) else None,
            lora=lora,
            audio=EncodedAudio(tuple(_blocks(groups.cross_tokens, groups)), groups.cross_tokens),
        )
        for index, length in enumerate(lengths)
    ]
    lengths_by_id = {request.request_id: len(request.token_ids) for request in requests}
    return _step(new=requests, scheduled=lengths_by_id, states=_states(lengths_by_id, groups))


def context_step(
    num_tokens: int, num_before: int, groups: CacheGroups, params: SamplingParams | PoolingParams = GREEDY
) -> SchedulerOutput:
    """Return a step of one new prompt of which `num_before` tokens are cached and `num_tokens` are computed. It attends
    only to blocks that it writes, again and again."""
    length = num_before + num_tokens
    num_written = min(max(num_tokens // groups.block_size, 1), groups.num_blocks)
    step = prefill_step([length], groups, params)
    [request] = step.new_requests
    blocks = [index % num_written for index in range(-(-(length + 1) // groups.block_size))]
    request = replace(request, num_computed_tokens=num_before, block_ids=[blocks for _ in request.block_ids])
    states = {key: StateSteps(0, each.writes) for key, each in step.states.items()}
    return replace(step, new_requests=[request], num_chunk_tokens={request.request_id: num_tokens}, states=states)


def image_step(
    height: int,
    width: int,
    image_input: ImageInput,
    groups: CacheGroups,
    most_tokens: int,
    params: SamplingParams | PoolingParams,
) -> SchedulerOutput:
    """Return a step that encodes an image of this size in pixels, and computes a prompt of its tokens if `most_tokens`
    are enough, otherwise one of `most_tokens` plain tokens."""
    num_tokens = image_input.num_tokens(height, width)
    step = prefill_step([min(num_tokens, most_tokens)], groups, params)
    new = step.new_requests
    if num_tokens <= most_tokens:
        new = [replace(new[0], media=(MediaSpan(MEDIA_HASH, 0, num_tokens, (height, width, 3)),))]
    pixels = bytes(height * width * 3)
    return replace(step, new_requests=new, encoder_inputs=[EncoderInput(MEDIA_HASH, (height, width, 3), pixels)])


def audio_step(
    audio_input: AudioInput, groups: CacheGroups, most_tokens: int, params: SamplingParams | PoolingParams
) -> SchedulerOutput:
    """Return a step that encodes the longest audio, for a prompt of one token that reads it, or as `image_step` for a
    prompt of its tokens."""
    samples, shape = bytes(audio_input.max_samples * SAMPLE_BYTES), (audio_input.max_samples,)
    if audio_input.cross_attention:
        step = prefill_step([1], groups, params)
        audio = step.new_requests[0].audio
        return replace(step, cross_inputs=[CrossInput(list(audio.block_ids), audio.num_tokens, samples)])
    num_tokens = audio_input.max_tokens
    step = prefill_step([min(num_tokens, most_tokens)], groups, params)
    new = step.new_requests
    if num_tokens <= most_tokens:
        new = [replace(new[0], media=(MediaSpan(MEDIA_HASH, 0, num_tokens, shape),))]
    return replace(step, new_requests=new, encoder_inputs=[EncoderInput(MEDIA_HASH, shape, samples)])


def first_pooled_steps(groups: CacheGroups, pooling: PoolingConfig, *, max_num_tokens: int) -> list[SchedulerOutput]:
    """Return the steps of a pooled prompt of at most `max_num_tokens` tokens, and of the end of its request."""
    prefill = prefill_step([min(FIRST_TOKENS, max_num_tokens)], groups, pooling_examples(pooling)[0])
    return [prefill, finish_step(list(prefill.num_scheduled_tokens))]


def first_steps(groups: CacheGroups, *, max_num_tokens: int) -> list[SchedulerOutput]:
    """Return a prefill of at most `max_num_tokens` tokens, a decode of its request, and the end of that request."""
    num_tokens = min(FIRST_TOKENS, max_num_tokens)
    prefill = prefill_step([num_tokens], groups)
    request_ids = list(prefill.num_scheduled_tokens)
    return [prefill, decode_step(request_ids, num_tokens), finish_step(request_ids)]


def decode_step(request_ids: list[str], num_computed_tokens: int, num_tokens: int = 1) -> SchedulerOutput:
    """Return a step that computes `num_tokens` tokens of each of these requests."""
    cached = [
        CachedRequestData(request_id=request_id, num_computed_tokens=num_computed_tokens, new_block_ids=())
        for request_id in request_ids
    ]
    return _step(cached=cached, scheduled=dict.fromkeys(request_ids, num_tokens))


def finish_step(request_ids: list[str]) -> SchedulerOutput:
    """Return a step without tokens that removes these requests."""
    return _step(finished=request_ids)


def _blocks(num_tokens: int, groups: CacheGroups) -> list[int]:
    return [block % groups.num_blocks for block in range(-(-num_tokens // groups.block_size))]


def _states(lengths: Mapping[str, int], groups: CacheGroups) -> dict[str, StateSteps]:
    """Return a state slot for each prompt. Prompts may share slots: what they write is never checked."""
    if not groups.num_state_slots:
        return {}
    return {
        request_id: StateSteps(NO_STATE, ((length, index % groups.num_state_slots),))
        for index, (request_id, length) in enumerate(lengths.items())
    }


def _step(
    *,
    new: list[NewRequestData] | None = None,
    cached: list[CachedRequestData] | None = None,
    scheduled: dict[str, int] | None = None,
    finished: list[str] | None = None,
    states: Mapping[str, StateSteps] | None = None,
) -> SchedulerOutput:
    counts = scheduled or {}
    return SchedulerOutput(
        step=0,
        new_requests=new or [],
        cached_requests=cached or [],
        decode_request_ids=[request_id for request_id, num_tokens in counts.items() if num_tokens == 1],
        num_chunk_tokens={request_id: num_tokens for request_id, num_tokens in counts.items() if num_tokens > 1},
        finished_request_ids=finished or [],
        preempted_request_ids=[],
        states=states or {},
    )
