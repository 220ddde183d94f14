"""Checks of a request against the limits of its model and engine."""

import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from proa.contract import (
    Audio,
    AudioInput,
    EngineCoreRequest,
    Image,
    ImageInput,
    PoolingTask,
    SamplingParams,
    token_ids_of,
)
from proa.contract.audio import SAMPLE_BYTES
from proa.contract.request import HASH_BYTES

# Each step compares all words of several tokens with the end of the output, each padded to the longest word's length.
MAX_BAD_WORDS = 1024  # words of several tokens
MAX_BAD_WORD_TOKENS = 256
MAX_PROMPT_EMBEDS = 256  # pieces of one prompt; each block's hash looks through them
_UNSET = (SamplingParams(), SamplingParams(max_tokens=None))  # the second: read from a message without any


@dataclass(frozen=True, slots=True)
class LengthLimits:
    """The limits of a request's length. `cache_capacity` is the number of tokens that the whole KV cache holds."""

    max_model_len: int  # tokens of prompt and output together
    cache_capacity: int = sys.maxsize

    def check(self, request: EngineCoreRequest) -> None:
        """Raises `ValueError`, with a message for the client, if the request is too long ever to be served."""
        num_prompt, num_resumed = len(request.prompt_token_ids), len(request.resumed_token_ids)
        if num_prompt == 0:
            raise ValueError("the prompt must hold at least one token")
        known = f"the prompt's {num_prompt} tokens" + f" and the {num_resumed} already generated" * bool(num_resumed)
        context = f"this model's maximum context length is {self.max_model_len} tokens, and {known}"
        if num_prompt + num_resumed > self.max_model_len:
            raise ValueError(f"{context} exceed it; shorten the prompt")
        if request.pooling_params is None and num_prompt + num_resumed == self.max_model_len:
            raise ValueError(f"{context} leave no room for an output; shorten the prompt")
        if num_prompt + num_resumed > self.cache_capacity:
            raise ValueError(f"{known} exceed the engine's KV cache, which holds {self.cache_capacity} tokens")
        max_tokens = request.sampling_params.max_tokens
        if num_resumed and max_tokens is not None and num_resumed >= max_tokens:
            raise ValueError(f"max_tokens ({max_tokens}) leaves no token after the {num_resumed} already generated")

    def max_num_tokens(self, request: EngineCoreRequest) -> int:
        """Return the number of tokens, prompt and output together, at which the request ends. Not for pooled requests.

        The KV cache limits it as the model's context does, but one token later, since the last token is never computed.
        So a request that has the whole cache to itself always finishes.
        """
        limit = min(self.max_model_len, self.cache_capacity + 1)
        max_tokens = request.sampling_params.max_tokens
        return limit if max_tokens is None else min(limit, len(request.prompt_token_ids) + max_tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelLimits:
    vocab_size: int
    lengths: LengthLimits
    max_logprobs: int = 20
    grammars: bool = False  # whether the engine compiles grammars
    prefix_caching: bool = True
    pooling_tasks: frozenset[PoolingTask] = frozenset()
    pooling_only: bool = False  # the model generates no tokens
    embedding_size: int = 0
    max_loras: int = 0  # different adapters in one step; 0: no adapters
    images: ImageInput | None = None  # None: the engine reads none
    max_image_tokens: int = 0  # of one image
    audios: AudioInput | None = None  # None: the engine reads none
    max_audio_tokens: int = 0  # of one audio
    prompt_embeds_size: int = 0  # values of an embedding in a prompt; 0: the engine accepts none


def check_request(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Raises `ValueError`, with a message for the client, if the model cannot serve the request."""
    limits.lengths.check(request)
    _check_vocabulary("the prompt", request.prompt_token_ids, limits)
    _check_vocabulary("resumed_token_ids", request.resumed_token_ids, limits)
    if request.prefill_only:
        check_prefill(request, limits)
    else:
        check_sampling_params(request.sampling_params, limits)
        check_pooling_params(request, limits)
    if request.lora_name and not limits.max_loras:
        raise ValueError("this engine does not support LoRA adapters; start it with --enable-lora")
    check_images(request, limits)
    check_audios(request, limits)
    check_prompt_embeds(request, limits)


def check_sampling_params(params: SamplingParams, limits: ModelLimits) -> None:
    """Check token ids against the vocabulary, the numbers of log probabilities, and whether grammars are supported."""
    if params.grammar is not None:
        if not limits.grammars:
            raise ValueError("this engine does not support grammars")
        _check_vocabulary("start_after", params.grammar.start_after, limits)
        _check_vocabulary("free_if_first", params.grammar.free_if_first, limits)
    _check_vocabulary("logit_bias", params.logit_bias, limits)
    _check_vocabulary("allowed_token_ids", params.allowed_token_ids, limits)
    _check_vocabulary("stop_token_ids", params.stop_token_ids, limits)
    _check_vocabulary("logprob_token_ids", params.logprob_token_ids, limits)
    _check_vocabulary("begin_suppress_token_ids", params.begin_suppress_token_ids, limits)
    if params.timestamps:
        ids = params.timestamps.begin_id, params.timestamps.no_timestamps_id, params.timestamps.end_id
        _check_vocabulary("timestamps", ids, limits)
    _check_bad_words(params.bad_words_token_ids, limits)
    for name, count in (("logprobs", params.logprobs), ("prompt_logprobs", params.prompt_logprobs)):
        if count is not None and count > limits.max_logprobs:
            raise ValueError(f"{name} must be at most {limits.max_logprobs}, got {count}")


def check_prefill(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check that a prefill-only request caches blocks. Its sampling parameters have no effect, so they are not
    checked."""
    if request.pooling_params is not None:
        raise ValueError("a prefill_only request cannot have pooling_params")
    if request.sampling_params.prompt_logprobs is not None:
        raise ValueError("a prefill_only request cannot have prompt_logprobs")
    if limits.pooling_only:
        raise ValueError("this model generates no tokens; it accepts no prefill_only requests")
    if not limits.prefix_caching:
        raise ValueError("prefill_only requests need prefix caching, which is off in this engine")


def check_pooling_params(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check that the model supports the task of a pooled request, and that the request has no sampling parameters."""
    params = request.pooling_params
    if params is None:
        if limits.pooling_only:
            raise ValueError("this model generates no tokens; it supports pooling tasks only")
        return
    if request.sampling_params not in _UNSET:
        raise ValueError("a pooled request cannot have sampling_params")
    if params.task not in limits.pooling_tasks:
        raise ValueError(f"this model does not support the pooling task {params.task.name}")
    if request.resumed_token_ids:
        raise ValueError("a pooled request cannot have resumed_token_ids")
    _check_vocabulary("score_token_ids", params.score_token_ids, limits)
    aligned = limits.audios if params.task is PoolingTask.ALIGN else None
    most = aligned.max_tokens if aligned else limits.embedding_size
    if params.dimensions is not None and params.dimensions > most:
        raise ValueError(f"dimensions must be at most {most}, got {params.dimensions}")


def check_images(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check the sizes of images and their places in the prompt. Hashes are not compared with the pixels."""
    if not request.images:
        return
    if limits.images is None:
        raise ValueError("this engine reads no images: its model has no image encoder, or it was not loaded")
    end = 0
    for index, image in enumerate(request.images):
        name = f"image {index}"
        _check_image(name, image, limits.images)
        if image.num_tokens > limits.max_image_tokens:
            raise ValueError(
                f"{name} has {image.num_tokens} tokens, and the engine encodes images of at most "
                f"{limits.max_image_tokens}; make the image smaller, or start the engine with a larger "
                "--encoder-cache-size and --max-num-batched-tokens"
            )
        _check_place(name, image, end, request, token_ids_of(image, limits.images))
        end = image.end


def check_audios(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check the lengths of audios and their places in the prompt. Hashes are not compared with the samples."""
    if limits.audios is None:
        if request.audios:
            raise ValueError("this engine reads no audio: its model has no audio encoder, or it was not loaded")
        return
    if limits.audios.cross_attention:
        _check_transcription(request)
    end = 0
    for index, audio in enumerate(request.audios):
        name = f"audio {index}"
        _check_audio(name, audio, limits.audios)
        if limits.audios.cross_attention:
            continue
        if audio.num_tokens > limits.max_audio_tokens:
            raise ValueError(
                f"{name} has {audio.num_tokens} tokens, and the engine encodes audios of at most "
                f"{limits.max_audio_tokens}; make it shorter, or start the engine with a larger --encoder-cache-size "
                "and --max-num-batched-tokens"
            )
        _check_place(name, audio, end, request, token_ids_of(audio, limits.audios))
        end = audio.end


def check_prompt_embeds(request: EngineCoreRequest, limits: ModelLimits) -> None:
    """Check the sizes of embeddings and their places in the prompt. Their values are checked by
    `proa_engine.prompt_embeds`."""
    if not request.prompt_embeds:
        return
    if not limits.prompt_embeds_size:
        raise ValueError("this engine accepts no prompt embeddings; start it with --enable-prompt-embeds")
    if request.pooling_params is not None:
        raise ValueError("a pooled request cannot have prompt embeddings")
    if request.sampling_params.prompt_logprobs is not None:
        raise ValueError("prompt_logprobs are not computed of prompts with embeddings, which are no tokens")
    if len(request.prompt_embeds) > MAX_PROMPT_EMBEDS:
        raise ValueError(
            f"a prompt can have {MAX_PROMPT_EMBEDS} pieces of embeddings, got {len(request.prompt_embeds)}"
        )
    end = 0
    for index, embeds in enumerate(request.prompt_embeds):
        name = f"piece {index} of the prompt's embeddings"
        if embeds.size != limits.prompt_embeds_size:
            raise ValueError(
                f"{name} must have {limits.prompt_embeds_size} values for each token, the model's hidden size, got "
                f"{embeds.size}"
            )
        if embeds.offset < end or embeds.end > len(request.prompt_token_ids):
            raise ValueError(
                f"{name} has the prompt's tokens from {embeds.offset} to {embeds.end - 1}, which must follow the piece "
                f"before it and be inside the prompt of {len(request.prompt_token_ids)} tokens"
            )
        if any(request.prompt_token_ids[embeds.offset : embeds.end]):
            raise ValueError(f"the prompt's token ids in the place of {name} must all be 0")
        if any(each.offset < embeds.end and each.end > embeds.offset for each in request.media):
            raise ValueError(f"{name} overlaps an image or an audio")
        end = embeds.end


def _check_image(name: str, image: Image, images: ImageInput) -> None:
    """Check an image's hash, size and number of tokens, without the prompt."""
    height, width = image.height, image.width
    if len(image.hash) != HASH_BYTES:
        raise ValueError(f"the hash of {name} must have {HASH_BYTES} bytes, got {len(image.hash)}")
    if not height or not width or height % images.unit or width % images.unit:
        raise ValueError(f"height and width of {name} must be multiples of {images.unit} pixels, got {height}x{width}")
    if images.side and (height, width) != (images.side, images.side):
        raise ValueError(f"{name} must have {images.side}x{images.side} pixels, got {height}x{width}")
    if images.max_side and max(height, width) >= images.max_side + images.unit:
        raise ValueError(
            f"the sides of {name} must have at most {images.max_side} pixels, rounded up to multiples of "
            f"{images.unit}, got {height}x{width}"
        )
    if images.max_pixels and not images.min_pixels <= height * width <= images.max_pixels:
        raise ValueError(
            f"{name} must have {images.min_pixels} to {images.max_pixels} pixels, got {height}x{width} = "
            f"{height * width}"
        )
    if image.pixels and len(image.pixels) != height * width * 3:
        raise ValueError(
            f"the pixels of {name} must be {height * width * 3} bytes of RGB, or empty, got {len(image.pixels)}"
        )
    if image.num_tokens != images.num_tokens(height, width):
        raise ValueError(
            f"{name} of {height}x{width} pixels has {images.num_tokens(height, width)} tokens, got {image.num_tokens}"
        )


def _check_transcription(request: EngineCoreRequest) -> None:
    """Check a request to a model whose tokens all read one audio."""
    if len(request.audios) != 1:
        raise ValueError(f"a request to this model must have exactly one audio, got {len(request.audios)}")
    if request.prefill_only:
        raise ValueError("this model accepts no prefill_only requests: another engine would encode the audio again")
    if request.prompt_embeds:
        raise ValueError("this model accepts no prompt embeddings")


def _check_audio(name: str, audio: Audio, audios: AudioInput) -> None:
    """Check an audio's hash, length and number of tokens, without the prompt."""
    if len(audio.hash) != HASH_BYTES:
        raise ValueError(f"the hash of {name} must have {HASH_BYTES} bytes, got {len(audio.hash)}")
    num_tokens = audios.num_tokens(audio.num_samples)
    if not num_tokens:
        raise ValueError(f"{name} is too short: of {audio.num_samples} samples the model makes no token")
    if audio.num_samples > audios.max_samples:
        raise ValueError(f"{name} must have at most {audios.max_samples} samples, got {audio.num_samples}")
    if audio.samples and len(audio.samples) != audio.num_samples * SAMPLE_BYTES:
        raise ValueError(
            f"the samples of {name} must be {audio.num_samples * SAMPLE_BYTES} bytes of float32, or empty, got "
            f"{len(audio.samples)}"
        )
    if audios.cross_attention and (audio.offset or audio.num_tokens):
        raise ValueError(f"{name} must have no tokens in the prompt, which this model does not read audio from")
    if not audios.cross_attention and audio.num_tokens != num_tokens:
        raise ValueError(f"{name} of {audio.num_samples} samples has {num_tokens} tokens, got {audio.num_tokens}")


def _check_place(
    name: str, media: Image | Audio, end: int, request: EngineCoreRequest, expected: Sequence[int]
) -> None:
    """Check that an image or an audio has the `expected` tokens in the prompt, behind those before `end`."""
    if media.offset < end or media.end > len(request.prompt_token_ids):
        raise ValueError(
            f"{name} has the prompt's tokens from {media.offset} to {media.end - 1}, which must follow the "
            f"{name.split()[0]} before it and be inside the prompt of {len(request.prompt_token_ids)} tokens"
        )
    own = list(request.prompt_token_ids[media.offset : media.end])
    if own != expected:
        token_id, other = next(pair for pair in zip(expected, own, strict=True) if pair[0] != pair[1])
        raise ValueError(f"the prompt has the token {other} in the place of a token {token_id} of {name}")


def _check_bad_words(words: Sequence[Sequence[int]], limits: ModelLimits) -> None:
    if (count := sum(len(word) > 1 for word in words)) > MAX_BAD_WORDS:
        raise ValueError(
            f"bad_words_token_ids must have at most {MAX_BAD_WORDS} words of more than one token, got {count}"
        )
    for word in words:
        if len(word) > MAX_BAD_WORD_TOKENS:
            raise ValueError(
                f"a word of bad_words_token_ids must have at most {MAX_BAD_WORD_TOKENS} tokens, got {len(word)}"
            )
        _check_vocabulary("bad_words_token_ids", word, limits)


def _check_vocabulary(where: str, token_ids: Iterable[int], limits: ModelLimits) -> None:
    for extreme in (min(token_ids, default=0), max(token_ids, default=0)):
        if not 0 <= extreme < limits.vocab_size:
            raise ValueError(
                f"token id {extreme} in {where} is outside the model's vocabulary of {limits.vocab_size} tokens"
            )
