"""Check that the images of requests have the hashes of their pixels, as images of one hash are encoded once."""

import asyncio
from collections.abc import Sequence

from proa.contract import EngineCoreRequest, Image
from proa.image.hash import hash_image
from proa_engine.server.errors import InvalidRequest

MAX_INLINE_BYTES = 256 * 1024
"""Most pixels that are hashed on the event loop, in about 0.2 ms."""


async def check_pixels(request: EngineCoreRequest) -> None:
    """Raises `InvalidRequest` for a wrong hash. Many pixels are hashed on a thread."""
    if sum(len(image.pixels) for image in request.images) <= MAX_INLINE_BYTES:
        wrong = _find_wrong(request.images)
    else:
        wrong = await asyncio.to_thread(_find_wrong, request.images)
    if wrong is not None:
        raise InvalidRequest(f"the hash of image {wrong} is not that of its pixels")


def _find_wrong(images: Sequence[Image]) -> int | None:
    """The index of the first image with another hash than that of its pixels."""
    for index, image in enumerate(images):
        if image.pixels and hash_image(image.pixels, image.height, image.width) != image.hash:
            return index
    return None
