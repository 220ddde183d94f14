"""Validation of requests against a model's limits."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proa.contract import (
    Audio,
    AudioInput,
    AudioLayer,
    EmbeddingType,
    EngineCoreRequest,
    Grammar,
    Image,
    PoolingParams,
    PoolingTask,
    PromptEmbeds,
    SamplingParams,
)
from proa.contract.pb import from_pb
from proa.engine.v1 import core_pb2
from proa_engine.core.admission.validation import LengthLimits, ModelLimits, check_request
from support.core import make_pooled, make_request
from support.fake_images import IMAGE_INPUT

LIMITS = ModelLimits(vocab_size=100, lengths=LengthLimits(10), max_logprobs=5)


@pytest.mark.parametrize(
    "request_",
    [
        make_request(prompt=[0, 99]),
        make_request(prompt=[1] * 9),
        make_request(logprobs=5, prompt_logprobs=5),
        make_request(logit_bias={99: 1.0}, allowed_token_ids=[0], stop_token_ids=[99], bad_words_token_ids=[[1, 99]]),
        make_request(prompt=[1, 2], resumed=[3, 4], max_tokens=3),
        make_request(prompt=[1, 2], resumed=[3, 4], max_tokens=None),
    ],
)
def test_accepts_valid_requests(request_: Any) -> None:
    check_request(request_, LIMITS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_request(prompt=[]), "the prompt must hold at least one token"),
        (
            make_request(prompt=[1] * 10),
            "context length is 10 tokens, and the prompt's 10 tokens leave no room",
        ),
        (make_request(prompt=[1, 100]), "token id 100 in the prompt is outside the model's vocabulary of 100 tokens"),
        (make_request(prompt=[1, -1]), "token id -1 in the prompt"),
        (make_request(logprobs=6), "logprobs must be at most 5, got 6"),
        (make_request(prompt_logprobs=6), "prompt_logprobs must be at most 5, got 6"),
        (make_request(logit_bias={100: 1.0}), "token id 100 in logit_bias"),
        (make_request(allowed_token_ids=[100]), "token id 100 in allowed_token_ids"),
        (make_request(stop_token_ids=[100]), "token id 100 in stop_token_ids"),
        (make_request(bad_words_token_ids=[[1, 100]]), "token id 100 in bad_words_token_ids"),
        (
            make_request(bad_words_token_ids=[[index // 99, index % 99, 1] for index in range(1025)]),
            "at most 1024 words of more than one token, got 1025",
        ),
        (make_request(bad_words_token_ids=[[1] * 257]), "a word of bad_words_token_ids must have at most 256 tokens"),
        (make_request(grammar=Grammar(text='start: "a"')), "this engine does not support grammars"),
        (make_request(resumed=[100]), "token id 100 in resumed_token_ids"),
        (
            make_request(resumed=[1, 2], max_tokens=2),
            r"max_tokens \(2\) leaves no token after the 2 already generated",
        ),
        (
            make_request(prompt=[1] * 8, resumed=[1, 2]),
            "the prompt's 8 tokens and the 2 already generated leave no room for an output",
        ),
    ],
)
def test_rejects_invalid_requests(request_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, LIMITS)


POOLING_LIMITS = replace(
    LIMITS, pooling_tasks=frozenset({PoolingTask.EMBED, PoolingTask.TOKEN_LOGPROBS}), embedding_size=8
)


@pytest.mark.parametrize(
    "request_",
    [
        make_pooled(prompt=[1] * 10),
        replace(make_pooled(), pooling_params=PoolingParams(task=PoolingTask.EMBED, dimensions=8)),
        replace(make_pooled(), sampling_params=from_pb(SamplingParams, core_pb2.SamplingParams())),
        make_request(),
    ],
)
def test_accepts_valid_pooled_requests_beside_others(request_: Any) -> None:
    check_request(request_, POOLING_LIMITS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (make_pooled(prompt=[1] * 11), "context length is 10 tokens, and the prompt's 11 tokens exceed it"),
        (make_pooled(task=PoolingTask.CLASSIFY), "does not support the pooling task CLASSIFY"),
        (
            replace(make_pooled(), pooling_params=PoolingParams(task=PoolingTask.EMBED, dimensions=9)),
            "dimensions must be at most 8, got 9",
        ),
        (
            replace(
                make_pooled(),
                pooling_params=PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(100,)),
            ),
            "token id 100 in score_token_ids",
        ),
        (replace(make_pooled(), resumed_token_ids=[1]), "cannot have resumed_token_ids"),
        (replace(make_pooled(), sampling_params=SamplingParams(prompt_logprobs=1)), "cannot have sampling_params"),
        (
            replace(make_pooled(), sampling_params=SamplingParams(grammar=Grammar(text='start: "a"'))),
            "cannot have sampling_params",
        ),
    ],
)
def test_rejects_invalid_pooled_requests(request_: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, replace(POOLING_LIMITS, grammars=True))


def test_a_model_without_an_output_layer_accepts_only_pooled_requests() -> None:
    limits = replace(POOLING_LIMITS, pooling_only=True)
    check_request(make_pooled(), limits)
    with pytest.raises(ValueError, match="this model generates no tokens"):
        check_request(make_request(), limits)


IMAGE_LIMITS = replace(
    LIMITS,
    lengths=LengthLimits(20),
    images=replace(IMAGE_INPUT, token_id=99, unit=2, min_pixels=4, max_pixels=24),
    max_image_tokens=4,
)
IMAGE = Image(hash=bytes(16), offset=1, num_tokens=2, height=2, width=4, pixels=bytes(24))


def with_images(*images: Image, prompt: Sequence[int] = (1, 99, 99, 2, 99, 99, 3)) -> EngineCoreRequest:
    return replace(make_request(prompt=prompt), images=images)


@pytest.mark.parametrize(
    "request_",
    [
        with_images(IMAGE),
        with_images(IMAGE, replace(IMAGE, offset=4, pixels=b"")),
        with_images(IMAGE, replace(IMAGE, offset=3), prompt=[1, 99, 99, 99, 99]),
        with_images(prompt=[99, 99]),
        with_images(replace(IMAGE, offset=0, num_tokens=4, height=4, pixels=b""), prompt=[99] * 4),
    ],
)
def test_accepts_images(request_: EngineCoreRequest) -> None:
    check_request(request_, IMAGE_LIMITS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (with_images(replace(IMAGE, hash=b"")), "the hash of image 0 must have 16 bytes, got 0"),
        (with_images(replace(IMAGE, height=3)), "height and width of image 0 must be multiples of 2 pixels, got 3x4"),
        (with_images(replace(IMAGE, height=0)), "height and width of image 0 must be multiples of 2 pixels, got 0x4"),
        (with_images(replace(IMAGE, height=2, width=14)), "image 0 must have 4 to 24 pixels, got 2x14 = 28"),
        (with_images(replace(IMAGE, pixels=b"123")), "the pixels of image 0 must be 24 bytes of RGB, or empty, got 3"),
        (with_images(replace(IMAGE, num_tokens=1)), "image 0 of 2x4 pixels has 2 tokens, got 1"),
        (
            with_images(replace(IMAGE, num_tokens=6, height=2, width=12, pixels=b"")),
            "image 0 has 6 tokens, and the engine encodes images of at most 4",
        ),
        (
            with_images(IMAGE, replace(IMAGE, offset=2)),
            "image 1 has the prompt's tokens from 2 to 3, which must follow",
        ),
        (with_images(replace(IMAGE, offset=6)), "tokens from 6 to 7, .* be inside the prompt of 7 tokens"),
        (with_images(replace(IMAGE, offset=2)), "the prompt has the token 2 in the place of a token 99 of image 0"),
    ],
)
def test_rejects_invalid_images(request_: EngineCoreRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, IMAGE_LIMITS)


def test_rejects_images_of_another_size_than_all_images_of_the_model() -> None:
    limits = replace(IMAGE_LIMITS, images=replace(IMAGE_INPUT, token_id=99, unit=2, side=4))
    check_request(with_images(replace(IMAGE, num_tokens=4, height=4, pixels=b""), prompt=[1, *[99] * 4]), limits)
    with pytest.raises(ValueError, match="image 0 must have 4x4 pixels, got 2x4"):
        check_request(with_images(IMAGE), limits)


def test_rejects_images_with_a_side_over_the_models_limit_or_rows_that_nothing_ends() -> None:
    input = replace(IMAGE_INPUT, token_id=99, unit=2, max_pixels=0, max_side=5, row_end="<row>", row_end_id=98)
    limits = replace(IMAGE_LIMITS, images=input, max_image_tokens=5)
    image, tokens = replace(IMAGE, height=4, width=2, num_tokens=3), [1, 99, 98, 99]
    check_request(with_images(image, prompt=tokens), limits)
    check_request(
        with_images(replace(image, height=6, width=2, num_tokens=5, pixels=b""), prompt=[*tokens, 98, 99]), limits
    )
    with pytest.raises(ValueError, match=r"the sides of image 0 must have at most 5 pixels, rounded up .* got 8x2"):
        check_request(with_images(replace(image, height=8, num_tokens=7, pixels=b"")), limits)
    with pytest.raises(ValueError, match="the token 99 in the place of a token 98 of image 0"):
        check_request(with_images(image, prompt=[1, 99, 99, 99]), limits)


def test_rejects_images_if_the_engine_reads_none() -> None:
    with pytest.raises(ValueError, match="this engine reads no images"):
        check_request(with_images(IMAGE), LIMITS)


AUDIO_LIMITS = ModelLimits(
    vocab_size=100,
    lengths=LengthLimits(10),
    audios=AudioInput(
        sampling_rate=100, hop=2, pad_to=2, layers=(AudioLayer(kernel=2, stride=2),), max_samples=40, token_id=99
    ),
    max_audio_tokens=4,
)
AUDIO = Audio(hash=bytes(16), offset=1, num_tokens=2, num_samples=7, samples=bytes(28))


def with_audios(*audios: Audio, prompt: Sequence[int] = (1, 99, 99, 2, 99, 99, 3)) -> EngineCoreRequest:
    return replace(make_request(prompt=prompt), audios=audios)


@pytest.mark.parametrize(
    "request_",
    [
        with_audios(AUDIO),
        with_audios(AUDIO, replace(AUDIO, offset=4, samples=b"")),
        with_audios(prompt=[99, 99]),
        with_audios(replace(AUDIO, offset=0, num_tokens=4, num_samples=15, samples=b""), prompt=[99] * 4),
    ],
)
def test_accepts_audios(request_: EngineCoreRequest) -> None:
    check_request(request_, AUDIO_LIMITS)


@pytest.mark.parametrize(
    ("request_", "message"),
    [
        (with_audios(replace(AUDIO, hash=b"")), "the hash of audio 0 must have 16 bytes, got 0"),
        (with_audios(replace(AUDIO, num_samples=0)), "audio 0 is too short: of 0 samples the model makes no token"),
        (with_audios(replace(AUDIO, num_samples=2)), "audio 0 is too short: of 2 samples the model makes no token"),
        (with_audios(replace(AUDIO, num_samples=41)), "audio 0 must have at most 40 samples, got 41"),
        (
            with_audios(replace(AUDIO, samples=b"123")),
            "of audio 0 must be 28 bytes of float32, or empty, got 3",
        ),
        (with_audios(replace(AUDIO, num_tokens=1)), "audio 0 of 7 samples has 2 tokens, got 1"),
        (
            with_audios(replace(AUDIO, num_tokens=5, num_samples=20, samples=b"")),
            "audio 0 has 5 tokens, and the engine encodes audios of at most 4",
        ),
        (
            with_audios(AUDIO, replace(AUDIO, offset=2)),
            "audio 1 has the prompt's tokens from 2 to 3, which must follow the audio before it",
        ),
        (with_audios(replace(AUDIO, offset=2)), "the prompt has the token 2 in the place of a token 99 of audio 0"),
    ],
)
def test_rejects_invalid_audios(request_: EngineCoreRequest, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(request_, AUDIO_LIMITS)


def test_an_alignment_has_at_most_the_values_of_the_longest_audio() -> None:
    limits = replace(AUDIO_LIMITS, pooling_tasks=frozenset({PoolingTask.ALIGN}))
    assert limits.audios is not None
    most = limits.audios.max_tokens
    longest, longer = (PoolingParams(task=PoolingTask.ALIGN, dimensions=number) for number in (most, most + 1))
    check_request(replace(make_pooled(prompt=[1]), pooling_params=longest), limits)
    with pytest.raises(ValueError, match=f"dimensions must be at most {most}"):
        check_request(replace(make_pooled(prompt=[1]), pooling_params=longer), limits)


def test_a_model_with_cross_attention_reads_exactly_one_audio_without_tokens_in_the_prompt() -> None:
    input = AudioInput(sampling_rate=100, hop=2, pad_to=40, max_samples=40, cross_attention=True)
    limits = replace(AUDIO_LIMITS, audios=input, max_audio_tokens=0)
    audio = replace(AUDIO, offset=0, num_tokens=0)
    check_request(with_audios(audio), limits)
    with pytest.raises(ValueError, match="audio 0 must have no tokens in the prompt"):
        check_request(with_audios(AUDIO), limits)
    for audios in ((), (audio, audio)):
        with pytest.raises(ValueError, match=f"must have exactly one audio, got {len(audios)}"):
            check_request(with_audios(*audios), limits)
    with pytest.raises(ValueError, match="accepts no prefill_only requests"):
        check_request(replace(with_audios(audio), prefill_only=True), limits)
    embeds = PromptEmbeds(num_tokens=1, type=EmbeddingType.FLOAT32, values=bytes(4))
    with pytest.raises(ValueError, match="accepts no prompt embeddings"):
        check_request(replace(with_audios(audio), prompt_embeds=(embeds,)), limits)


def test_rejects_audios_if_the_engine_reads_none() -> None:
    with pytest.raises(ValueError, match="this engine reads no audio"):
        check_request(with_audios(AUDIO), LIMITS)


def test_sampling_parameters_of_a_prefill_only_request_are_not_checked() -> None:
    params: dict[str, Any] = {"grammar": Grammar(text='start: "a"'), "logprobs": 6, "stop_token_ids": [100]}
    check_request(replace(make_request(**params), prefill_only=True), LIMITS)


@pytest.mark.parametrize(
    ("request_", "limits", "message"),
    [
        (make_request(prompt=[100]), LIMITS, "token id 100 in the prompt"),
        (make_request(prompt=[1] * 11), LIMITS, "context length is 10 tokens"),
        (make_request(lora_name="x"), LIMITS, "does not support LoRA adapters"),
        (make_pooled(), LIMITS, "a prefill_only request cannot have pooling_params"),
        (make_request(prompt_logprobs=0), LIMITS, "a prefill_only request cannot have prompt_logprobs"),
        (make_request(), replace(LIMITS, pooling_only=True), "accepts no prefill_only requests"),
        (make_request(), replace(LIMITS, prefix_caching=False), "prefill_only requests need prefix caching"),
    ],
)
def test_rejects_prefill_only_requests_that_cache_nothing(
    request_: EngineCoreRequest, limits: ModelLimits, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        check_request(replace(request_, prefill_only=True), limits)
