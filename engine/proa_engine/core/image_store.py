"""ImageStore: the pixels of recent images, in host memory."""

from collections.abc import Iterable
from dataclasses import replace

from proa.contract import Image


class ImageStore:
    """Keeps images with their pixels, up to `max_bytes` of these. The least recently used one is evicted first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: dict[bytes, Image] = {}  # by hash, the least recently used first

    def missing(self, images: Iterable[Image]) -> list[bytes]:
        """The hashes of images without pixels that are not kept either."""
        found = self._pixels(images)
        return list(dict.fromkeys(image.hash for image in images if image.hash not in found))

    def complete(self, images: Iterable[Image]) -> tuple[Image, ...]:
        """Keep the images, none of which is missing, and return them with their pixels."""
        found = self._pixels(images)
        completed = tuple(replace(image, pixels=found[image.hash]) for image in images)
        for image in completed:
            self._keep(image)
        return completed

    def _pixels(self, images: Iterable[Image]) -> dict[bytes, bytes]:
        """By hash. Those that are kept come first, so that requests for the same image share them."""
        found = {image.hash: image.pixels for image in images if image.pixels}
        for image in images:
            kept = self._images.get(image.hash)
            if kept is not None and (kept.height, kept.width) == (image.height, image.width):
                found[image.hash] = kept.pixels
        return found

    def _keep(self, image: Image) -> None:
        known = self._images.pop(image.hash, None)
        if known is not None:
            self._num_bytes -= len(known.pixels)
        if len(image.pixels) > self._max_bytes:
            return
        self._images[image.hash] = image
        self._num_bytes += len(image.pixels)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._images.pop(next(iter(self._images))).pixels)
