"""SentImages: the images whose pixels an engine has been sent in a session, and probably still has."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import replace

from proa.contract import Image

ENGINE_BYTES = 2**30
"""Pixels that an engine keeps: the default of its --mm-processor-cache-gb. One that keeps fewer, or has dropped some
for those of other gateways, rejects a request without them."""
MIN_BYTES = 2**16
"""That an image counts at least, so that the number of images is bounded too."""


class SentImages:
    """The last ones up to `max_bytes` of pixels, by their hash."""

    def __init__(self, max_bytes: int = ENGINE_BYTES) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._sizes: OrderedDict[bytes, int] = OrderedDict()  # the last one was used last

    def strip(self, images: Iterable[Image]) -> tuple[Image, ...]:
        """What to send: the images, without the pixels of those that the engine has. It has all of them then."""
        return tuple(replace(image, pixels=b"") if self.add(image) else image for image in images)

    def add(self, image: Image) -> bool:
        """The image is sent, with its pixels unless it was sent before. Return whether it was."""
        if image.hash in self._sizes:
            self._sizes.move_to_end(image.hash)
            return True
        self._sizes[image.hash] = size = max(MIN_BYTES, len(image.pixels))
        self._num_bytes += size
        while self._num_bytes > self._max_bytes:
            _, size = self._sizes.popitem(last=False)
            self._num_bytes -= size
        return False

    def forget(self, hashes: Iterable[bytes]) -> None:
        """The engine does not have them."""
        for hash in hashes:
            self._num_bytes -= self._sizes.pop(hash, 0)
