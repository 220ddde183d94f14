"""ImageEncodings: what the image encoder has made of images, on the device, for as long as the core keeps them."""

from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from proa_engine.core.types import EncoderInput, SchedulerOutput
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.base import ImageEncoder
from proa_engine.models.image_config import ImageConfig


class ImagePart(NamedTuple):
    """Neighbouring tokens of an image, counted from its first one."""

    hash: bytes
    first: int
    end: int


class EncoderWork(NamedTuple):
    """What a step does before its forward pass: it forgets images, then it encodes some."""

    freed: list[bytes]  # hashes
    images: list[EncoderInput]


def encoding_rank(index: int, world_size: int) -> int:
    """The rank that encodes image `index` of a step."""
    return index % world_size


def for_rank(scheduler_output: SchedulerOutput, rank: int, world_size: int) -> SchedulerOutput:
    """The plan without the pixels of images that other ranks encode."""
    images = [
        image if encoding_rank(index, world_size) == rank else replace(image, pixels=b"")
        for index, image in enumerate(scheduler_output.encoder_inputs)
    ]
    return replace(scheduler_output, encoder_inputs=images)


class ImageEncodings:
    """Its methods are device work, in the order of the steps.

    All ranks have the encoder's weights. They share the images of a step in turns and then send each other the results,
    so every rank has the same bits, and no rank gets pixels that another one encodes. One image is encoded by rank 0
    alone: the others would need as long for the same.
    """

    def __init__(
        self,
        encoder: ImageEncoder,
        config: ImageConfig,
        dtype: torch.dtype,
        device: torch.device,
        parallel: ParallelContext,
    ) -> None:
        """`dtype` is the model's type."""
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
        """The encoded tokens of these parts, one after the other, [tokens, embedding_width]."""
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
        """[height, width, 3] uint8 on the device, without waiting for it: pinned memory is not reused before it is
        copied."""
        pixels = torch.empty(image.height, image.width, 3, dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        pixels.numpy().reshape(-1)[:] = np.frombuffer(image.pixels, np.uint8)
        return pixels.to(self._device, non_blocking=True)

    def _empty(self, image: EncoderInput) -> Tensor:
        num_tokens = self._config.input.num_tokens(image.height, image.width)
        return torch.empty(num_tokens, self._config.embedding_width, dtype=self._dtype, device=self._device)
