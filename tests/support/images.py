"""Images for tests of steps: an ImageConfig, an encoder without weights, and plans with images."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from proa.contract import ImageInput
from proa_engine.core.types import EncoderInput, MediaSpan, SchedulerOutput
from proa_engine.models.image_config import ImageConfig

UNIT = 4  # pixels
WIDTH = 6  # of an embedding
IMAGE_TOKEN = 250


def image_config(*, has_three_positions: bool = True, attends_within: bool = False) -> ImageConfig:
    return ImageConfig(
        input=ImageInput(
            token_id=IMAGE_TOKEN,
            token="<image>",
            placeholder="<image>",
            unit=UNIT,
            min_pixels=UNIT * UNIT,
            max_pixels=100 * UNIT * UNIT,
            resample=3,
        ),
        embedding_width=WIDTH,
        has_three_positions=has_three_positions,
        attends_within=attends_within,
    )


class FakeEncoder:
    """Embeddings are the mean color of a token's square, then its row, its column and the number of calls before."""

    def __init__(self) -> None:
        self.num_calls = 0

    def __call__(self, pixels: Tensor) -> Tensor:
        height, width, _ = pixels.shape
        squares = pixels.float().view(height // UNIT, UNIT, width // UNIT, UNIT, 3).mean((1, 3))
        rows, columns = torch.meshgrid(*map(torch.arange, squares.shape[:2]), indexing="ij")
        places = torch.stack((rows, columns, torch.full_like(rows, self.num_calls)), -1)
        self.num_calls += 1
        return torch.cat((squares, places), -1).flatten(0, 1)

    def parameters(self) -> Iterator[Tensor]:
        return iter(())


def span(offset: int, rows: int, columns: int, name: bytes = b"a") -> MediaSpan:
    """Of an image of this many rows and columns of tokens."""
    return MediaSpan(name, offset, rows * columns, (rows * UNIT, columns * UNIT, 3))


def encoder_input(image: MediaSpan, color: int = 7) -> EncoderInput:
    return EncoderInput(image.hash, image.shape, bytes([color]) * math.prod(image.shape))


def with_images(
    plan: SchedulerOutput,
    images: Mapping[str, Sequence[MediaSpan]],
    encoded: Sequence[EncoderInput] = (),
    freed: Sequence[bytes] = (),
) -> SchedulerOutput:
    """The plan with images of its new requests, by request id."""
    new = [replace(request, media=tuple(images.get(request.request_id, ()))) for request in plan.new_requests]
    return replace(plan, new_requests=new, encoder_inputs=list(encoded), freed_media=list(freed))
