"""Images and audios: their encodings on the device, and which tokens of a step belong to them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import EncoderInput, MediaSpan, NewRequestData, SchedulerOutput
from proa_engine.layers.attention_metadata import EmbeddedRows
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.base import AudioEncoder, ImageEncoder
from proa_engine.models.image_config import ImageConfig
from proa_engine.step.columns import Columns, ForwardInputs, Rows, StepLayout, StepPart
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import Packer

IMAGE_DIMS, AUDIO_DIMS = 3, 1  # lengths of `EncoderInput.shape`


class MediaPart(NamedTuple):
    """Neighbouring tokens of an image or an audio, counted from its first token."""

    hash: bytes
    first: int
    end: int


class EncoderWork(NamedTuple):
    """Changes of the encodings before a step's forward pass: those in `freed` are freed, then `inputs` are encoded."""

    freed: list[bytes]  # hashes
    inputs: list[EncoderInput]


def encoding_rank(index: int, world_size: int) -> int:
    """Return the rank that encodes image or audio `index` of a step."""
    return index % world_size


def for_rank(scheduler_output: SchedulerOutput, rank: int, world_size: int) -> SchedulerOutput:
    """Return the `scheduler_output` for one rank: without the pixels of images, and the samples of audios, that other
    ranks encode."""
    inputs = [
        each if encoding_rank(index, world_size) == rank else replace(each, data=b"")
        for index, each in enumerate(scheduler_output.encoder_inputs)
    ]
    audios = [
        audio if encoding_rank(index, world_size) == rank else replace(audio, samples=b"")
        for index, audio in enumerate(scheduler_output.cross_inputs)
    ]
    return replace(scheduler_output, encoder_inputs=inputs, cross_inputs=audios)


class MediaEncoder(Protocol):
    """Encodes one kind of input."""

    width: int  # of an embedding

    def num_tokens(self, shape: tuple[int, ...]) -> int: ...

    def encode(self, input: EncoderInput, device: torch.device) -> Tensor:
        """Return [tokens, width]. Queues the copy to the device and the work there."""
        ...


class PixelEncoder:
    """Encodes images."""

    def __init__(self, encoder: ImageEncoder, config: ImageConfig) -> None:
        self.width = config.embedding_width
        self._encoder = encoder
        self._input = config.input

    def num_tokens(self, shape: tuple[int, ...]) -> int:
        return self._input.num_tokens(*shape[:2])

    def encode(self, input: EncoderInput, device: torch.device) -> Tensor:
        return self._encoder(to_device(input.data, input.shape, torch.uint8, device))


class SampleEncoder:
    """Encodes audios."""

    def __init__(self, encoder: AudioEncoder, config: AudioConfig) -> None:
        self.width = config.embedding_width
        self._encoder = encoder
        self._input = config.input

    def num_tokens(self, shape: tuple[int, ...]) -> int:
        return self._input.num_tokens(*shape)

    def encode(self, input: EncoderInput, device: torch.device) -> Tensor:
        return self._encoder(to_device(input.data, input.shape, torch.float32, device))


def to_device(data: bytes, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Copy pixels or samples to the device, in their shape, without waiting: pinned memory is not reused before it is
    copied."""
    values = torch.empty(shape, dtype=dtype, pin_memory=device.type == "cuda")
    values.view(-1).view(torch.uint8).numpy()[:] = np.frombuffer(data, np.uint8)
    return values.to(device, non_blocking=True)


class MediaEncodings:
    """Encoders' outputs on the device, kept until the core frees them. Call its methods in the order of the steps.

    All ranks have the encoders' weights. They encode the images and audios of a step in turns and broadcast the
    results, so every rank has the same bits, and no rank is sent pixels that another one encodes. A single image is
    encoded by rank 0 alone, because dividing it would save no time.
    """

    def __init__(
        self,
        encoders: Mapping[int, MediaEncoder],
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext,
    ) -> None:
        """`encoders`: by the number of dimensions of what they encode. `dtype` is the type of the model's
        activations."""
        self._encoders = encoders
        self._dtype = dtype
        self._device = device
        self._parallel = parallel
        self._encoded: dict[bytes, Tensor] = {}  # by hash: [tokens, embedding_width]

    def update(self, work: EncoderWork) -> None:
        for image_hash in work.freed:
            self._encoded.pop(image_hash, None)
        self._encode(work.inputs)

    def embeddings(self, parts: Sequence[MediaPart]) -> Tensor:
        """Return the encoded tokens of `parts`, concatenated, [tokens, embedding_width]."""
        tensors = [self._encoded[part.hash][part.first : part.end] for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _encode(self, inputs: Sequence[EncoderInput]) -> None:
        parallel = self._parallel
        ranks = [encoding_rank(index, parallel.world_size) for index in range(len(inputs))]
        own = {
            each.hash: self._encoders[len(each.shape)].encode(each, self._device).contiguous()
            for each, rank in zip(inputs, ranks, strict=True)
            if rank == parallel.rank
        }
        for each, rank in zip(inputs, ranks, strict=True):
            encoded = own[each.hash] if rank == parallel.rank else self._empty(each)
            self._encoded[each.hash] = parallel.broadcast(encoded, source=rank)

    def _empty(self, input: EncoderInput) -> Tensor:
        encoder = self._encoders[len(input.shape)]
        return torch.empty(encoder.num_tokens(input.shape), encoder.width, dtype=self._dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class EncodedTokens:
    """The tokens of a step that belong to images and audios."""

    encodings: MediaEncodings
    rows: int  # staged index: [N], their rows among the step's tokens
    parts: list[MediaPart]  # these N tokens, in order

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.media = EmbeddedRows(arrays[self.rows], self.encodings.embeddings(self.parts))


@dataclass(frozen=True, slots=True)
class EncoderPart(StepPart):
    """The encoder's work before a step's forward pass."""

    is_large = True

    encodings: MediaEncodings
    work: EncoderWork

    def before_forward(self, arrays: list[Tensor]) -> None:
        self.encodings.update(self.work)


@dataclass(frozen=True, slots=True)
class ComputedMedia:
    """An image or an audio of which a step computes tokens."""

    span: MediaSpan
    first: int  # index in the request of the first token that is computed
    end: int  # behind the last one
    row: int  # of the first one, among the step's tokens

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.first)

    @property
    def part(self) -> MediaPart:
        return MediaPart(self.span.hash, self.first - self.span.offset, self.end - self.span.offset)


class MediaColumns(Columns):
    """The images and audios of the slots whose requests have some."""

    def __init__(self, tables: SlotTables) -> None:
        self._media: dict[int, Sequence[MediaSpan]] = {}  # by slot
        self._ends = np.zeros(tables.num_slots, np.int64)  # prompt tokens up to the last image's end

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        if request.media:
            self._media[slot] = request.media
        self._ends[slot] = end_of(request.media)

    def remove(self, slot: int) -> None:
        self._media.pop(slot, None)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row computes a token of an image, or one before a later image: its positions are not a
        decode's."""
        return None if self._media and (rows.starts < self._ends[rows.slots]).any() else shape

    def computed(self, rows: Rows) -> Iterator[ComputedMedia]:
        """Yield the images of which the step computes tokens, in the order of its tokens."""
        if not self._media:
            return
        for row in np.flatnonzero(rows.starts < self._ends[rows.slots]).tolist():
            start, end = int(rows.starts[row]), int(rows.ends[row])
            shift = int(rows.query_start_loc[row]) - start
            for image in self._media[int(rows.slots[row])]:
                first, behind = max(image.offset, start), min(image.offset + image.num_tokens, end)
                if first < behind:
                    yield ComputedMedia(image, first, behind, first + shift)


class EncodedMedia(MediaColumns):
    """What this rank encodes, as all ranks of the first pipeline stage do: its layers read it."""

    def __init__(self, tables: SlotTables, encodings: MediaEncodings) -> None:
        super().__init__(tables)
        self._encodings = encodings

    def lay_out(self, rows: Rows, packer: Packer) -> EncodedTokens | None:
        """Return the step's tokens that belong to images; None if there are none."""
        computed = list(self.computed(rows))
        if not computed:
            return None
        token_rows = np.concatenate([np.arange(each.rows.start, each.rows.stop) for each in computed])
        return EncodedTokens(self._encodings, packer.add(token_rows), [each.part for each in computed])

    def lay_out_part(self, step: StepLayout, packer: Packer) -> EncoderPart | None:
        """Return the encoder's work; None if there is none."""
        plan = step.plan
        if not (plan.freed_media or plan.encoder_inputs):
            return None
        return EncoderPart(self._encodings, EncoderWork(plan.freed_media, plan.encoder_inputs))


def end_of(images: Sequence[MediaSpan]) -> int:
    """Return the number of tokens up to the end of the last image, 0 without images."""
    return images[-1].offset + images[-1].num_tokens if images else 0
