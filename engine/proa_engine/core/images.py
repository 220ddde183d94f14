"""Images: the images of all requests, their pixels on the host and their encodings on the workers."""

from proa.contract import EngineCoreRequest
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.image_store import ImageStore
from proa_engine.core.request_images import NO_IMAGES, NoImages, RequestImages


class Images:
    """`attends_within`: an image's tokens attend to all of it, so one step computes them.

    Then an image must have few enough tokens for a step that computes one token of every other running request too.
    """

    def __init__(
        self, store: ImageStore | None = None, cache: EncoderCache | None = None, *, attends_within: bool = False
    ) -> None:
        self.cache = cache or EncoderCache()
        self._store = store or ImageStore()
        self._attends_within = attends_within

    def missing(self, request: EngineCoreRequest) -> list[bytes]:
        """The hashes of the request's images without pixels whose pixels the engine has not kept."""
        return self._store.missing(request.images)

    def of(self, request: EngineCoreRequest) -> RequestImages | NoImages:
        """The images of an accepted request, none of which is missing. Their pixels live as long as the request."""
        if not request.images:
            return NO_IMAGES
        return RequestImages(self._store.complete(request.images), self.cache, attends_within=self._attends_within)
