"""Images for the fake model, whose tokens are pixels, and the encodings that a fake worker has."""

from collections.abc import Iterable, Sequence
from zlib import crc32

from proa.contract import Audio, Image, ImageInput
from proa.image.limits import hash_image
from proa_engine.core.types import MediaSpan, SchedulerOutput
from support.fake_audio import number_of

IMAGE_TOKEN = 60
IMAGE_INPUT = ImageInput(
    token_id=IMAGE_TOKEN, token="<image>", placeholder="<image>", unit=1, min_pixels=1, max_pixels=64, resample=3
)


def make_image(name: int, num_tokens: int, offset: int = 0) -> Image:
    """Images of the same name and size are equal."""
    pixels = bytes([name]) * 3 * num_tokens
    image_hash = hash_image(pixels, 1, num_tokens)
    return Image(hash=image_hash, offset=offset, num_tokens=num_tokens, height=1, width=num_tokens, pixels=pixels)


def insert_images(prompt: Sequence[int], images: Iterable[Image]) -> list[int]:
    """The prompt with the tokens of these images, by ascending offset, at their offsets."""
    token_ids = list(prompt)
    for image in images:
        assert image.offset <= len(token_ids)
        token_ids[image.offset : image.offset] = [IMAGE_TOKEN] * image.num_tokens
    return token_ids


def seen(token_ids: Sequence[int], media: Iterable[Image | MediaSpan | Audio]) -> list[int]:
    """What the fake model sees of a prompt: a number for each token, which depends on the image at an image's token,
    and at the first one on the audio that all tokens read."""
    numbers = list(token_ids)
    for image in media:
        if isinstance(image, Audio):
            numbers[0] += number_of(image.hash)
            continue
        for index in range(image.num_tokens):
            numbers[image.offset + index] = crc32(image.hash + bytes([index]))
    return numbers


class FakeEncodings:
    """The encoded images of a worker. `capacity` is in tokens; a step may encode `step_budget` of them, or one image.

    `attends_within`: no step may compute a part of an image that ends before the image does.
    """

    def __init__(self, capacity: int, step_budget: int, *, attends_within: bool) -> None:
        self.num_tokens: dict[bytes, int] = {}  # by hash
        self.num_encoded = 0
        self.num_freed = 0
        self._capacity = capacity
        self._step_budget = step_budget
        self._attends_within = attends_within

    def apply(self, plan: SchedulerOutput) -> None:
        """Free and encode what the step says."""
        if plan.is_empty:
            assert not plan.encoder_inputs
            assert not plan.freed_media
        for image_hash in plan.freed_media:
            assert image_hash in self.num_tokens, "an image is freed that is not encoded"
            del self.num_tokens[image_hash]
        for image in plan.encoder_inputs:
            assert image.hash not in self.num_tokens, "an image is encoded twice"
            assert image.hash == hash_image(image.data, *image.shape[:2])
            self.num_tokens[image.hash] = IMAGE_INPUT.num_tokens(*image.shape[:2])
        step = [IMAGE_INPUT.num_tokens(*image.shape[:2]) for image in plan.encoder_inputs]
        assert len(step) < 2 or sum(step) <= self._step_budget
        assert sum(self.num_tokens.values()) <= self._capacity, "more images than fit"
        self.num_encoded += len(step)
        self.num_freed += len(plan.freed_media)

    def read(self, request_id: str, images: Sequence[MediaSpan], start: int, end: int) -> None:
        """Read what the tokens `start` … `end` - 1 of a request need."""
        for image in images:
            if image.offset < end and image.offset + image.num_tokens > start:
                assert image.hash in self.num_tokens, f"{request_id} reads an image that is not encoded"
                assert not self._attends_within or end >= image.offset + image.num_tokens, (
                    f"{request_id} parts an image"
                )

    def clear(self) -> None:
        self.num_tokens.clear()
