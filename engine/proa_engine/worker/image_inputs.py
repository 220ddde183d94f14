"""Where images stand in the rows of a step, and the three positions of tokens. Host work; the results are staged index
arrays."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from proa_engine.core.types import ImageSpan
from proa_engine.worker.staging import IntArray, Packer

if TYPE_CHECKING:
    from proa_engine.worker.input_batch import InputBatch
    from proa_engine.worker.sampling_inputs import Rows


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


def reads_images(rows: "Rows", batch: "InputBatch") -> bool:
    """Whether a row computes a token of an image, or one before a later image: its positions are not those of a
    decode."""
    return bool((rows.starts < batch.image_ends[rows.slots]).any())


def image_inputs(rows: "Rows", positions: IntArray, batch: "InputBatch", packer: Packer) -> ImageInputs | None:
    """None if no token of the step stands for an image. `positions` [tokens] are the tokens' places."""
    assert batch.image_config is not None
    parts: list[ImagePart] = []
    token_rows: list[IntArray] = []
    ends = positions + 1 if batch.image_config.attends_within else None
    for row in np.flatnonzero(rows.starts < batch.image_ends[rows.slots]).tolist():
        start, end = int(rows.starts[row]), int(rows.ends[row])
        shift = int(rows.query_start_loc[row]) - start
        for image in batch.images[int(rows.slots[row])].spans:
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


def rotary_positions(rows: "Rows", positions: IntArray, batch: "InputBatch", packer: Packer) -> int | None:
    """Staged index of the tokens' three positions, [3 * tokens]; None if they are their places in all three.

    `positions` [tokens] are these places.
    """
    if batch.position_deltas is None:
        return None
    of_rows = [batch.images.get(slot) for slot in rows.slots.tolist()]
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
