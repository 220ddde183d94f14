"""Images in attention, on every pipeline stage: tokens that attend to all of their image, and tokens with three
positions (M-RoPE)."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from proa_engine.core.types import MediaSpan, NewRequestData
from proa_engine.models.image_config import ImageConfig
from proa_engine.step.columns import Columns, ForwardInputs, Rows
from proa_engine.step.media import MediaColumns, end_of
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import IntArray, Packer


def attention_columns(tables: SlotTables, config: ImageConfig) -> list[Columns]:
    """Return the columns of images that a model's attention reads."""
    columns: list[Columns] = []
    if config.attends_within:
        columns.append(AttendedImages(tables))
    if tables.position_deltas is not None:
        columns.append(PositionColumns(tables, tables.position_deltas, config.input.unit))
    return columns


@dataclass(frozen=True, slots=True)
class ImageEnds:
    """Behind which token each token of a step stops to attend, as `AttentionMetadata.ends`: a staged index."""

    index: int

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.ends = arrays[self.index].int()


class AttendedImages(MediaColumns):
    """Images whose tokens attend to all of the image."""

    def lay_out(self, rows: Rows, packer: Packer) -> ImageEnds | None:
        """Return where the step's tokens stop to attend; None if none belongs to an image."""
        computed = list(self.computed(rows))
        if not computed:
            return None
        ends = rows.token_positions() + 1
        for image in computed:
            ends[image.rows] = image.span.offset + image.span.num_tokens
        return ImageEnds(packer.add(ends))


@dataclass(frozen=True, slots=True)
class ImagePositions:
    """The images of a request and the positions of its tokens."""

    spans: Sequence[MediaSpan]  # by ascending offset
    positions: IntArray  # [3, end]: of the tokens up to the last image's end

    @classmethod
    def of(cls, images: Sequence[MediaSpan], unit: int) -> "ImagePositions":
        return cls(images, three_positions(images, unit)) if images else TEXT

    @property
    def end(self) -> int:
        """The number of tokens up to the end of the last image."""
        return end_of(self.spans)

    @property
    def delta(self) -> int:
        """The difference between a token's position and its index, for all tokens behind the last image."""
        if not self.spans:
            return 0
        last = self.spans[-1]
        # An image's positions reach to its first one plus max(rows, columns) - 1, and no earlier one is larger.
        return int(self.positions[:, last.offset :].max()) + 1 - self.end


TEXT = ImagePositions((), np.zeros((3, 0), np.int64))  # a request without images


def three_positions(images: Sequence[MediaSpan], unit: int) -> IntArray:
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
        height, width = image.shape[0] // unit, image.shape[1] // unit
        rows, columns = np.divmod(np.arange(image.num_tokens), width)
        parts.append(position + np.stack((np.zeros_like(rows), rows, columns)))
        position += max(height, width)
        place = image.offset + image.num_tokens
    return np.concatenate(parts, axis=1)


@dataclass(frozen=True, slots=True)
class PositionOffsets:
    """What is added to the places of a step's tokens for their three positions, [3 * tokens]: a staged index.

    Relative, so that it still holds when draft tokens move to their true places.
    """

    index: int

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.positions = forward.positions + arrays[self.index].view(3, -1)


class PositionColumns(MediaColumns):
    """The positions of the slots' tokens, for models with three positions a token."""

    def __init__(self, tables: SlotTables, deltas: Tensor, unit: int) -> None:
        """`deltas`: `SlotTables.position_deltas`. `unit`: pixels of a token's square, along each side."""
        super().__init__(tables)
        self._deltas = deltas
        self._unit = unit
        self._positions: dict[int, ImagePositions] = {}  # by slot

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        super().add(request, slot, edits)
        positions = self._positions[slot] = ImagePositions.of(request.media, self._unit)
        edits.write(self._deltas, (slot,), (positions.delta,))

    def remove(self, slot: int) -> None:
        super().remove(slot)
        self._positions.pop(slot, None)

    def lay_out(self, rows: Rows, packer: Packer) -> PositionOffsets | None:
        """Return the offsets of the step's tokens; None if no row's request has images."""
        slots = rows.slots.tolist()
        if self._media.keys().isdisjoint(slots):
            return None
        places = rows.token_positions()
        offsets = np.zeros((3, places.size), np.int64)
        for row, slot in enumerate(slots):
            positions = self._positions[slot]
            first, behind = int(rows.query_start_loc[row]), int(rows.query_start_loc[row + 1])
            start = int(rows.starts[row])
            num_before = min(max(positions.end - start, 0), behind - first)  # tokens up to the last image's end
            before = slice(first, first + num_before)
            offsets[:, before] = positions.positions[:, start : start + num_before] - places[before]
            offsets[:, first + num_before : behind] = positions.delta
        return PositionOffsets(packer.add(offsets.reshape(-1)))
