"""ImageCache: prepared images by their files, so that a conversation that sends one again does not wait for it."""

from collections import OrderedDict
from dataclasses import dataclass

from proa.contract import Image, ImageInput


@dataclass(frozen=True, slots=True)
class ImageKey:
    digest: bytes  # SHA-256 of the file
    input: ImageInput


class ImageCache:
    """Drops what was used longest ago, to keep within `max_bytes` of pixels."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._images: OrderedDict[ImageKey, Image] = OrderedDict()
        self.num_bytes = 0

    def get(self, key: ImageKey) -> Image | None:
        image = self._images.get(key)
        if image is not None:
            self._images.move_to_end(key)
        return image

    def add(self, key: ImageKey, image: Image) -> None:
        if key in self._images:
            return
        self._images[key] = image
        self.num_bytes += len(image.pixels)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._images.popitem(last=False)[1].pixels)
