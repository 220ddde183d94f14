"""Images: their encodings on the device, which tokens of a step belong to images, and their three positions
(M-RoPE)."""

from collections.abc import Sequence
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
from proa_engine.step.staging import IntArray, Packer


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
    """Return the rank that encodes image `index` of a step."""
    return index % world_size


def for_rank(scheduler_output: SchedulerOutput, rank: int, world_size: int) -> SchedulerOutput:
    """Return the `scheduler_output` for one rank: without the pixels of images that other ranks encode."""
    images = [
        image if encoding_rank(index, world_size) == rank else replace(image, pixels=b"")
        for index, image in enumerate(scheduler_output.encoder_inputs)
    ]
    return replace(scheduler_output, encoder_inputs=images)


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
class ImagePositions:
    """The images of a request and the positions of its tokens."""

    spans: Sequence[ImageSpan]  # by ascending offset
    positions: IntArray | None  # [3, end]: of the tokens up to the last image's end; None: the model has one a token

    @property
    def end(self) -> int:
        """The number of tokens up to the end of the last image."""
        return self.spans[-1].offset + self.spans[-1].num_tokens

    @property
    def delta(self) -> int:
        """The difference between a token's position and its index, for all tokens behind the last image."""
        if self.positions is None:
            return 0
        last = self.spans[-1]
        # An image's positions reach to its first one plus max(rows, columns) - 1, and no earlier one is larger.
        return int(self.positions[:, last.offset :].max()) + 1 - self.end


def three_positions(images: Sequence[ImageSpan], unit: int) -> IntArray:
    """Return time, row and column of the tokens up to the last image's end, [3, end].

    For text all three increase by one with each token. The tokens of an image have the coordinates of their squares of
    `unit` pixels, counted from the position after the text before it; text continues after the largest. (M-RoPE, Wang
    et al., 2024, arXiv 2409.12191.)
    """
    parts: list[IntArray] = []
    place = position = 0  # of the next token
    for image in images:
        num_before = image.offset - place
        parts.append(np.broadcast_to(np.arange(position, position + num_before), (3, num_before)))
        position += num_before
        height, width = image.height // unit, image.width // unit
        rows, columns = np.divmod(np.arange(image.num_tokens), width)
        parts.append(position + np.stack((np.zeros_like(rows), rows, columns)))
        position += max(height, width)
        place = image.offset + image.num_tokens
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """The tokens of a step that belong to images."""

    rows: int  # staged index: [N], their rows among the step's tokens
    parts: list[ImagePart]  # these N tokens, in order
    ends: int | None  # staged index: [tokens of the step], as `AttentionMetadata.ends`


@dataclass(frozen=True, slots=True)
class ImageInputs:
    encodings: ImageEncodings | None  # None: on a later pipeline stage, where no layer reads them
    tokens: ImageTokens | None
    # Staged index: [3 * tokens of the step], what is added to the tokens' places for their three positions; None: 0.
    # Relative, so that it still holds when draft tokens move to their true places.
    offsets: int | None

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        if self.tokens is not None:
            if self.encodings is not None:
                embeddings = self.encodings.embeddings(self.tokens.parts)
                forward.metadata.images = EmbeddedRows(arrays[self.tokens.rows], embeddings)
            forward.metadata.ends = None if self.tokens.ends is None else arrays[self.tokens.ends].int()
        if self.offsets is not None:
            forward.positions = forward.positions + arrays[self.offsets].view(3, -1)


@dataclass(frozen=True, slots=True)
class EncoderPart(StepPart):
    """The encoder's work before a step's forward pass."""

    is_large = True

    encodings: ImageEncodings
    work: EncoderWork

    def before_forward(self, arrays: list[Tensor]) -> None:
        self.encodings.update(self.work)


class ImageColumns(Columns):
    """The images of the slots whose requests have images."""

    def __init__(self, tables: SlotTables, config: ImageConfig, encodings: ImageEncodings | None) -> None:
        """`encodings` None: this rank encodes no images, because only the first pipeline stage reads them."""
        self._tables = tables
        self._config = config
        self._encodings = encodings
        self._images: dict[int, ImagePositions] = {}  # by slot
        self._ends = np.zeros(tables.num_slots, np.int64)  # prompt tokens up to the last image's end

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        images: ImagePositions | None = None
        if request.images:
            config = self._config
            positions = three_positions(request.images, config.input.unit) if config.has_three_positions else None
            images = self._images[slot] = ImagePositions(request.images, positions)
        self._ends[slot] = 0 if images is None else images.end
        if self._tables.position_deltas is not None:
            edits.write(self._tables.position_deltas, (slot,), (0 if images is None else images.delta,))

    def remove(self, slot: int) -> None:
        self._images.pop(slot, None)

    def graph_shape(self, rows: Rows, shape: GraphShape) -> GraphShape | None:
        """Return None if a row computes a token of an image, or one before a later image: its positions are not a
        decode's."""
        return None if self._images and (rows.starts < self._ends[rows.slots]).any() else shape

    def lay_out(self, rows: Rows, packer: Packer) -> ImageInputs | None:
        if not self._images:
            return None
        places = rows.token_positions()
        tokens, offsets = self._tokens(rows, places, packer), self._offsets(rows, places, packer)
        return None if tokens is None and offsets is None else ImageInputs(self._encodings, tokens, offsets)

    def lay_out_part(self, step: StepLayout, packer: Packer) -> EncoderPart | None:
        """Return the encoder's work; None if there is none, or if another pipeline stage does it."""
        plan = step.plan
        if self._encodings is None or not (plan.freed_images or plan.encoder_inputs):
            return None
        return EncoderPart(self._encodings, EncoderWork(plan.freed_images, plan.encoder_inputs))

    def _tokens(self, rows: Rows, places: IntArray, packer: Packer) -> ImageTokens | None:
        """Return the step's tokens that belong to images; None if there are none. `places` [tokens]: each token's index
        in its request."""
        parts: list[ImagePart] = []
        token_rows: list[IntArray] = []
        ends = places + 1 if self._config.attends_within else None
        for row in np.flatnonzero(rows.starts < self._ends[rows.slots]).tolist():
            start, end = int(rows.starts[row]), int(rows.ends[row])
            shift = int(rows.query_start_loc[row]) - start
            for image in self._images[int(rows.slots[row])].spans:
                image_end = image.offset + image.num_tokens
                first, behind = max(image.offset, start), min(image_end, end)
                if first >= behind:
                    continue
                parts.append(ImagePart(image.hash, first - image.offset, behind - image.offset))
                token_rows.append(np.arange(first + shift, behind + shift))
                if ends is not None:
                    ends[first + shift : behind + shift] = image_end
        if not parts:
            return None
        staged_ends = None if ends is None else packer.add(ends)
        return ImageTokens(packer.add(np.concatenate(token_rows)), parts, staged_ends)

    def _offsets(self, rows: Rows, places: IntArray, packer: Packer) -> int | None:
        """Return `ImageTokens.offsets`: None if no row's request has images, or if the model has one position a
        token."""
        if self._tables.position_deltas is None:
            return None
        of_rows = [self._images.get(slot) for slot in rows.slots.tolist()]
        if not any(of_rows):
            return None
        offsets = np.zeros((3, places.size), np.int64)
        for row, images in enumerate(of_rows):
            if images is None:
                continue
            assert images.positions is not None
            first, behind = int(rows.query_start_loc[row]), int(rows.query_start_loc[row + 1])
            start, end = int(rows.starts[row]), images.end
            num_before = min(max(end - start, 0), behind - first)  # tokens up to the last image's end
            before = slice(first, first + num_before)
            offsets[:, before] = images.positions[:, start : start + num_before] - places[before]
            offsets[:, first + num_before : behind] = images.delta
        return packer.add(offsets.reshape(-1))
