"""Images: their encodings on the device, and which tokens of a step belong to images."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import EncoderInput, ImageSpan, NewRequestData, SchedulerOutput
from proa_engine.layers.attention_metadata import EmbeddedRows
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import ImageEncoder
from proa_engine.models.image_config import ImageConfig
from proa_engine.step.columns import Columns, ForwardInputs, Rows, StepLayout, StepPart
from proa_engine.step.decode_graphs import GraphShape
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import Packer


class ImagePart(NamedTuple):
    """Neighbouring tokens of an image, counted from the image's first token."""

    hash: bytes
    first: int
    end: int


class EncoderWork(NamedTuple):
    """Changes of the encodings before a step's forward pass: those in `freed` are freed, then `images` are encoded."""

    freed: list[bytes]  # hashes
    images: list[EncoderInput]


def encoding_rank(index: int, world_size: int) -> int:
    """Return the rank that encodes image or audio `index` of a step."""
    return index % world_size


def for_rank(scheduler_output: SchedulerOutput, rank: int, world_size: int) -> SchedulerOutput:
    """Return the `scheduler_output` for one rank: without the pixels of images, and the samples of audios, that other
    ranks encode."""
    images = [
        image if encoding_rank(index, world_size) == rank else replace(image, pixels=b"")
        for index, image in enumerate(scheduler_output.encoder_inputs)
    ]
    audios = [
        audio if encoding_rank(index, world_size) == rank else replace(audio, samples=b"")
        for index, audio in enumerate(scheduler_output.cross_inputs)
    ]
    return replace(scheduler_output, encoder_inputs=images, cross_inputs=audios)


class ImageEncodings:
    """The image encoder's outputs on the device, kept until the core frees them. Call its methods in the order of the
    steps.

    All ranks have the encoder's weights. They encode the images of a step in turns and broadcast the results, so every
    rank has the same bits, and no rank is sent pixels that another one encodes. A single image is encoded by rank 0
    alone, because dividing it would save no time.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        config: ImageConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext,
    ) -> None:
        """`dtype` is the type of the model's activations."""
        self._encoder = encoder
        self._config = config
        self._dtype = dtype
        self._device = device
        self._parallel = parallel
        self._encoded: dict[bytes, Tensor] = {}  # by hash: [tokens, embedding_width]

    def update(self, work: EncoderWork) -> None:
        for image_hash in work.freed:
            self._encoded.pop(image_hash, None)
        self._encode(work.images)

    def embeddings(self, parts: Sequence[ImagePart]) -> Tensor:
        """Return the encoded tokens of `parts`, concatenated, [tokens, embedding_width]."""
        tensors = [self._encoded[part.hash][part.first : part.end] for part in parts]
        return tensors[0] if len(tensors) == 1 else torch.cat(tensors)

    def _encode(self, images: Sequence[EncoderInput]) -> None:
        parallel = self._parallel
        ranks = [encoding_rank(index, parallel.world_size) for index in range(len(images))]
        own = {
            image.hash: self._encoder(self._pixels(image)).contiguous()
            for image, rank in zip(images, ranks, strict=True)
            if rank == parallel.rank
        }
        for image, rank in zip(images, ranks, strict=True):
            encoded = own[image.hash] if rank == parallel.rank else self._empty(image)
            self._encoded[image.hash] = parallel.broadcast(encoded, source=rank)

    def _pixels(self, image: EncoderInput) -> Tensor:
        """Copy the pixels to the device, [height, width, 3] uint8, without waiting: pinned memory is not reused before
        it is copied."""
        pixels = torch.empty(image.height, image.width, 3, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        pixels.numpy().reshape(-1)[:] = np.frombuffer(image.pixels, np.uint8)
        return pixels.to(self._device, non_blocking=True)

    def _empty(self, image: EncoderInput) -> Tensor:
        num_tokens = self._config.input.num_tokens(image.height, image.width)
        return torch.empty(num_tokens, self._config.embedding_width, dtype=self._dtype, device=self._device)


@dataclass(frozen=True, slots=True)
class EncodedTokens:
    """The tokens of a step that belong to images."""

    encodings: ImageEncodings
    rows: int  # staged index: [N], their rows among the step's tokens
    parts: list[ImagePart]  # these N tokens, in order

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.images = EmbeddedRows(arrays[self.rows], self.encodings.embeddings(self.parts))


@dataclass(frozen=True, slots=True)
class EncoderPart(StepPart):
    """The encoder's work before a step's forward pass."""

    is_large = True

    encodings: ImageEncodings
    work: EncoderWork

    def before_forward(self, arrays: list[Tensor]) -> None:
        self.encodings.update(self.work)


@dataclass(frozen=True, slots=True)
class ComputedImage:
    """An image of which a step computes tokens."""

    span: ImageSpan
    first: int  # index in the request of the first token that is computed
    end: int  # behind the last one
    row: int  # of the first one, among the step's tokens

    @property
    def rows(self) -> slice:
        return slice(self.row, self.row + self.end - self.first)

    @property
    def part(self) -> ImagePart:
        return ImagePart(self.span.hash, self.first - self.span.offset, self.end - self.span.offset)


class ImageColumns(Columns):
    """The images of the slots whose requests have images."""

    def __init__(self, tables: SlotTables) -> None:
        self._images: dict[int, Sequence[ImageSpan]] = {}  # by slot
        self._ends = np.zeros(tables.num_slots, np.int64)  # prompt tokens up to the last image's end

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        if request.images:
            self._images[slot] = request.images
        self._ends[slot] = end_of(request.images)

    def remove(self, slot: int) -> None:
        self._images.pop(slot, None)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row computes a token of an image, or one before a later image: its positions are not a
        decode's."""
        return None if self._images and (rows.starts < self._ends[rows.slots]).any() else shape

    def computed(self, rows: Rows) -> Iterator[ComputedImage]:
        """Yield the images of which the step computes tokens, in the order of its tokens."""
        if not self._images:
            return
        for row in np.flatnonzero(rows.starts < self._ends[rows.slots]).tolist():
            start, end = int(rows.starts[row]), int(rows.ends[row])
            shift = int(rows.query_start_loc[row]) - start
            for image in self._images[int(rows.slots[row])]:
                first, behind = max(image.offset, start), min(image.offset + image.num_tokens, end)
                if first < behind:
                    yield ComputedImage(image, first, behind, first + shift)


class EncodedImages(ImageColumns):
    """The images that this rank encodes, as all ranks of the first pipeline stage do: its layers read them."""

    def __init__(self, tables: SlotTables, encodings: ImageEncodings) -> None:
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
        if not (plan.freed_images or plan.encoder_inputs):
            return None
        return EncoderPart(self._encodings, EncoderWork(plan.freed_images, plan.encoder_inputs))


def end_of(images: Sequence[ImageSpan]) -> int:
    """Return the number of tokens up to the end of the last image, 0 without images."""
    return images[-1].offset + images[-1].num_tokens if images else 0
