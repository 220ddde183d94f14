"""Where images stand in the rows of a step, and the three positions of tokens. Host work; the results are staged index
arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import ImageSpan, NewRequestData
from proa_engine.models.image_config import ImageConfig
from proa_engine.worker.columns import Columns, Rows, Write
from proa_engine.worker.staging import IntArray, Packer


class ImagePart(NamedTuple):
    """Neighbouring tokens of an image, counted from its first one."""

    hash: bytes
    first: int
    end: int


@dataclass(frozen=True, slots=True)
class ImageInputs:
    """The tokens of a step that stand for images."""

    rows: int  # staged index: [N], their rows among the step's tokens
    parts: list[ImagePart]  # these N tokens, in order
    ends: int | None  # staged index: [tokens of the step], as `AttentionMetadata.ends`


@dataclass(frozen=True, slots=True)
class RequestImages:
    """The images of a request."""

    spans: Sequence[ImageSpan]  # by ascending offset
    positions: IntArray | None  # [3, end]: of the tokens up to the last image's end; None: the model has one a token

    @property
    def end(self) -> int:
        """Tokens up to the last image's end."""
        return self.spans[-1].offset + self.spans[-1].num_tokens

    @property
    def delta(self) -> int:
        """What is added to the places of all tokens behind the images for their positions."""
        if self.positions is None:
            return 0
        last = self.spans[-1]
        # An image's positions reach to its first one plus max(rows, columns) - 1, and no earlier one is larger.
        return int(self.positions[:, last.offset :].max()) + 1 - self.end


def three_positions(images: Sequence[ImageSpan], unit: int) -> IntArray:
    """Time, row and column of the tokens up to the last image's end, [3, end].

    Text counts on by one in all three. The tokens of an image are at their squares of `unit` pixels, counted from the
    position after the text before it; text goes on behind the largest. (M-RoPE, Wang et al., 2024, arXiv 2409.12191.)
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


class ImageColumns(Columns):
    """`position_deltas` [slots] int64, on the device, for models with three positions: what is added to the places of
    tokens behind all images. None: the model has one position a token."""

    def __init__(self, config: ImageConfig, max_num_seqs: int, device: torch.device) -> None:
        self._config = config
        self._images: dict[int, RequestImages] = {}  # only slots of requests with images
        self._ends = np.zeros(max_num_seqs, np.int64)  # prompt tokens up to the last image's end
        self.position_deltas: Tensor | None = None
        if config.has_three_positions:
            self.position_deltas = torch.zeros(max_num_seqs, dtype=torch.int64, device=device)
        self._new: list[tuple[int, int]] = []  # slot and delta that are not on the device yet

    def add(self, slot: int, request: NewRequestData) -> None:
        self._ends[slot], delta = 0, 0
        if request.images:
            three = self._config.has_three_positions
            positions = three_positions(request.images, self._config.input.unit) if three else None
            images = self._images[slot] = RequestImages(request.images, positions)
            self._ends[slot], delta = images.end, images.delta
        if self.position_deltas is not None:
            self._new.append((slot, delta))

    def remove(self, slot: int) -> None:
        self._images.pop(slot, None)

    def pack_edits(self, packer: Packer) -> Write | None:
        deltas = self.position_deltas
        if deltas is None or not self._new:
            return None
        slots, values = (packer.add(array) for array in np.array(self._new, np.int64).T)
        self._new.clear()

        def write(arrays: Sequence[Tensor]) -> None:
            deltas.index_copy_(0, arrays[slots], arrays[values])

        return write

    def reads(self, rows: Rows) -> bool:
        """Whether a row computes a token of an image, or one before a later image: its positions are not those of a
        decode."""
        return bool((rows.starts < self._ends[rows.slots]).any())

    def lay_out(self, rows: Rows, positions: IntArray, packer: Packer) -> ImageInputs | None:
        """None if no token of the step stands for an image. `positions` [tokens] are the tokens' places."""
        if not self._images:
            return None
        parts: list[ImagePart] = []
        token_rows: list[IntArray] = []
        ends = positions + 1 if self._config.attends_within else None
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
        return ImageInputs(packer.add(np.concatenate(token_rows)), parts, staged_ends)

    def rotary_positions(self, rows: Rows, positions: IntArray, packer: Packer) -> int | None:
        """Staged index of the tokens' three positions, [3 * tokens]; None if they are their places in all three.

        `positions` [tokens] are these places.
        """
        if self.position_deltas is None or not self._images:
            return None
        of_rows = [self._images.get(slot) for slot in rows.slots.tolist()]
        if not any(of_rows):
            return None
        three = np.tile(positions, (3, 1))
        for row, images in enumerate(of_rows):
            if images is None:
                continue
            assert images.positions is not None
            first, behind = int(rows.query_start_loc[row]), int(rows.query_start_loc[row + 1])
            start, end = int(rows.starts[row]), images.end
            num_before = min(max(end - start, 0), behind - first)  # tokens up to the last image's end
            three[:, first : first + num_before] = images.positions[:, start : start + num_before]
            three[:, first + num_before : behind] += images.delta
        return packer.add(three.reshape(-1))
