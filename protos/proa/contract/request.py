"""EngineCoreRequest: one request to an engine, with its images, or what is computed of its prompt."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Final

from proa.contract.audio import Audio, AudioInput
from proa.contract.prompt_embeds import PromptEmbeds
from proa.contract.sampling_params import SamplingParams

HASH_BYTES: Final = 16
"""Of the hash of an image, of an audio, or of a block of tokens."""

_MAX_SOURCE_RANKS = 1024
_MAX_ADDRESS_CHARACTERS = 300  # a host name has at most 253


@dataclass(frozen=True, slots=True, kw_only=True)
class Image:
    """One image of a prompt, resized as the model's `ImageInput` says. Until it has a place, `offset` is 0."""

    hash: bytes  # `proa.image.hash_image`
    offset: int = 0  # prompt tokens before its first one
    num_tokens: int
    height: int  # pixels
    width: int
    # uint8 RGB, row by row; empty: the engine has kept those of this hash
    pixels: bytes = field(default=b"", repr=False)

    @property
    def end(self) -> int:
        """The number of prompt tokens up to its last one."""
        return self.offset + self.num_tokens

    @property
    def data(self) -> bytes:
        """Its pixels."""
        return self.pixels

    @property
    def shape(self) -> tuple[int, ...]:
        return self.height, self.width, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageInput:
    """How a model reads images: to which size they are resized, and how they stand in a prompt."""

    token_id: int  # stands in the prompt once for each square of `unit` pixels
    token: str  # its text
    placeholder: str  # what the chat template writes for an image; `prefix`, tokens and `suffix` replace it
    prefix: str = ""
    suffix: str = ""
    row_end_id: int = 0  # stands between two rows of an image's tokens, if `row_end` is set
    row_end: str = ""  # its text; empty: nothing stands there
    unit: int  # pixels; heights and widths are multiples of it
    side: int = 0  # height and width of every image; 0: images keep their shape, within limits
    max_side: int = 0  # of the longer side, before it is rounded up; 0: the limits are those of pixels
    min_pixels: int = 0
    max_pixels: int = 0
    fills: bool = False  # images grow or shrink to `max_pixels`, and their sides are rounded down
    resample: int  # Pillow's number of the filter

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the largest image."""
        if side := self.side or self.max_side:
            side = -(-side // self.unit) * self.unit
            return self.num_tokens(side, side)
        return self.max_pixels // self.unit**2

    def num_tokens(self, height: int, width: int) -> int:
        """Return the number of tokens of an image of this size in pixels."""
        rows, columns = height // self.unit, width // self.unit
        return rows * columns + (rows - 1 if self.row_end else 0)


def token_ids_of(media: Image | Audio, input: ImageInput | AudioInput) -> list[int]:
    """The ids of the tokens that an image or an audio has in a prompt."""
    ids = [input.token_id] * media.num_tokens
    if isinstance(media, Image) and isinstance(input, ImageInput) and input.row_end:
        columns = media.width // input.unit
        ids[columns :: columns + 1] = [input.row_end_id] * (media.height // input.unit - 1)
    return ids


def media_keys(media: Sequence[Image | Audio], start: int, end: int) -> tuple[bytes, ...]:
    """What the hash of the block of tokens start … end - 1 has behind the other extra keys: for each image or audio
    that the block touches, by ascending offset, its hash, then its offset from `start` as little-endian int32."""
    return tuple(
        each.hash + struct.pack("<i", each.offset - start) for each in media if each.offset < end and each.end > start
    )


class PoolingTask(IntEnum):
    """What a pooled request asks for."""

    EMBED = 1  # one embedding of the prompt
    TOKEN_EMBED = 2  # one of each token
    CLASSIFY = 3  # one value for each of the model's labels
    TOKEN_LOGPROBS = 4  # the log probabilities of `score_token_ids` as the token after the prompt
    TOKEN_CLASSIFY = 5  # the values of the labels at each token
    ALIGN = 6  # how much each token reads of each token of the audio, by the heads for alignment

    @property
    def is_by_token(self) -> bool:
        """Whether there is a row of values for each token of the prompt."""
        return self in (PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY, PoolingTask.ALIGN)


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingParams:
    """Raises `ValueError` for fields that do not belong to the task."""

    task: PoolingTask
    dimensions: int | None = None  # leading values of each embedding or alignment that are kept; None: all
    # Embeddings get length 1, labels become probabilities. None: as the model's files say.
    use_activation: bool | None = None
    score_token_ids: tuple[int, ...] = ()
    second_segment_start: int | None = None  # prompt tokens before the second text of a pair; None: it is one text
    expansion_start: int | None = None  # prompt tokens before those to which no token attends; None: there are none

    def __post_init__(self) -> None:
        if not isinstance(self.task, PoolingTask):
            raise ValueError(f"task must be one of {', '.join(task.name for task in PoolingTask)}")
        embeds = self.task in (PoolingTask.EMBED, PoolingTask.TOKEN_EMBED)
        if self.dimensions is not None and not embeds and self.task is not PoolingTask.ALIGN:
            raise ValueError("dimensions is only for embeddings and alignments")
        if self.dimensions is not None and self.dimensions < 1:
            raise ValueError(f"dimensions must be at least 1, got {self.dimensions}")
        if bool(self.score_token_ids) != (self.task is PoolingTask.TOKEN_LOGPROBS):
            raise ValueError("score_token_ids must be set for the log probabilities of tokens, and for nothing else")
        if self.expansion_start == 0:
            raise ValueError("expansion_start must be at least 1: a token must have one to attend to")
        if self.use_activation is not None and self.task in (PoolingTask.TOKEN_LOGPROBS, PoolingTask.ALIGN):
            raise ValueError("use_activation does not apply to log probabilities and alignments")


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSource:
    """An engine from which blocks of the KV cache may be fetched. Raises `ValueError` without addresses, and for more
    or longer ones than an engine can have."""

    addresses: tuple[str, ...]  # host:port of each rank's mover
    num_blocks: int = 0  # of the prompt, that it has or is about to compute; 0: all
    wait_ms: int = 0  # longest time without a block, at most 60,000, for which more counts; 0: 2000

    def __post_init__(self) -> None:
        if not self.addresses:
            raise ValueError("kv_source must have the addresses of the source's movers")
        if len(self.addresses) > _MAX_SOURCE_RANKS or max(map(len, self.addresses)) > _MAX_ADDRESS_CHARACTERS:
            raise ValueError(
                f"kv_source must have at most {_MAX_SOURCE_RANKS} addresses, of at most {_MAX_ADDRESS_CHARACTERS} "
                "characters"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCoreRequest:
    """A request for one output sequence or, with `pooling_params`, for numbers computed from the prompt."""

    request_id: str
    prompt_token_ids: Sequence[int]
    sampling_params: SamplingParams
    priority: int = 0  # lower first
    cache_salt: str = ""  # requests share cached prefixes only with requests of the same salt
    trace_headers: Mapping[str, str] = field(default_factory=dict)  # W3C trace context
    resumed_token_ids: Sequence[int] = ()  # output that another engine has generated
    arrival_time: float = 0.0  # Unix seconds; 0: when the engine receives it
    pooling_params: PoolingParams | None = None  # instead of `sampling_params`, which are then the defaults
    lora_name: str = ""  # of a loaded adapter; empty: none
    lora_digest: str = ""  # that this adapter must have; empty: any
    images: tuple[Image, ...] = ()  # of the prompt, by ascending offset
    prefill_only: bool = False  # compute and cache the prompt's full blocks, and generate nothing
    kv_source: KvSource | None = None  # may have blocks of the prompt
    prompt_embeds: tuple[PromptEmbeds, ...] = ()  # in the place of prompt tokens, by ascending offset
    tenant: str = ""  # whose request it is: tenants have fair shares of compiled grammars; empty: the session's
    retain: bool = False  # evict what it leaves in the cache after all that is not retained, until it is released
    audios: tuple[Audio, ...] = ()  # of the prompt, by ascending offset
    released: Sequence[bytes] = ()  # hashes of blocks that the session retains no more, in the order of their prompts
    client_index: int = field(default=0, metadata={"wire": False})  # the engine server's number of the caller

    @property
    def media(self) -> Sequence[Image | Audio]:
        """Images and audios by ascending offset."""
        if not self.audios:
            return self.images
        media: list[Image | Audio] = [*self.images, *self.audios]
        return sorted(media, key=lambda each: each.offset)


def extra_keys(
    cache_salt: str, lora_name: str, lora_digest: str, audios: Sequence[Audio] = ()
) -> tuple[bytes | str, ...]:
    """What the hash of each of a request's blocks has beside the tokens, see `proa.blocks`: nothing, the salt, or the
    salt, which may be empty, and the name and content of the adapter; then the hash of each audio that has no tokens in
    the prompt, because every token reads it."""
    keys = (cache_salt, lora_name, lora_digest) if lora_name else (cache_salt,) if cache_salt else ()
    return (*keys, *(each.hash for each in audios if not each.num_tokens)) if audios else keys
