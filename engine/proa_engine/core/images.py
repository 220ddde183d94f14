"""Images: checks that the pixels of requests' images are known, and makes each request's `RequestImages`."""

from collections.abc import Iterable
from dataclasses import replace

from proa.contract import EngineCoreRequest, Image
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.request_images import NO_IMAGES, NoImages, RequestImages


class ImageStore:
    """Keeps images with at most `max_bytes` of pixels. The least recently used image is evicted first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._images: dict[bytes, Image] = {}  # by hash, the least recently used first

    def missing(self, images: Iterable[Image]) -> list[bytes]:
        """Return the hashes of images whose pixels are neither given nor kept."""
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
        """Return pixels by hash. Kept ones take precedence, so that requests for the same image share the memory."""
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


class Images:
    """All images: their pixels on the host (`store`) and their encodings on the workers (`cache`).

    `attends_within`: an image's tokens attend to all of it, so one step computes them. Then an image must have few
    enough tokens for a step that computes one token of every other running request too.
    """

    def __init__(
        self, store: ImageStore | None = None, cache: EncoderCache | None = None, *, attends_within: bool = False
    ) -> None:
        self.cache = cache or EncoderCache()
        self._store = store or ImageStore()
        self._attends_within = attends_within

    def missing(self, request: EngineCoreRequest) -> list[bytes]:
        """Return the hashes of the request's images whose pixels are neither given nor kept."""
        return self._store.missing(request.images)

    def of(self, request: EngineCoreRequest) -> RequestImages | NoImages:
        """Return the images of an accepted request, none of which is missing. The request keeps their pixels until it
        ends."""
        if not request.images:
            return NO_IMAGES
        return RequestImages(self._store.complete(request.images), self.cache, attends_within=self._attends_within)
