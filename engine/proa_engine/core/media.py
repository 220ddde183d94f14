"""Media: checks that the content of requests' images and audios is known, and makes each request's `RequestMedia`."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from proa.contract import Audio, EngineCoreRequest, Image
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.kv.encoder_blocks import CrossAudio, EncoderBlocks
from proa_engine.core.request_media import NO_MEDIA, PlacedMedia, RequestMedia


class MediaStore:
    """Keeps images and audios with at most `max_bytes` of pixels and samples. The least recently used one is evicted
    first."""

    def __init__(self, max_bytes: int = 0) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._kept: dict[bytes, Image | Audio] = {}  # by hash, the least recently used first

    def missing(self, media: Sequence[Image | Audio]) -> list[bytes]:
        """Return the hashes of those whose pixels or samples are neither given nor kept."""
        found = self._find(media)
        return list(dict.fromkeys(each.hash for each in media if (each.hash, each.shape) not in found))

    def complete(self, media: Sequence[Image | Audio]) -> list[Image | Audio]:
        """Keep images and audios, none of which is missing, and return them with their pixels or samples."""
        found = self._find(media)
        completed = [replace(found[each.hash, each.shape], offset=each.offset) for each in media]
        for each in completed:
            self._keep(each)
        return completed

    def _find(self, media: Iterable[Image | Audio]) -> dict[tuple[bytes, tuple[int, ...]], Image | Audio]:
        """Return complete ones by hash and shape. Kept ones take precedence, so that requests for the same image share
        the memory."""
        found = {(each.hash, each.shape): each for each in media if each.data}
        for each in media:
            kept = self._kept.get(each.hash)
            if kept is not None and kept.shape == each.shape:
                found[each.hash, each.shape] = kept
        return found

    def _keep(self, media: Image | Audio) -> None:
        known = self._kept.pop(media.hash, None)
        if known is not None:
            self._num_bytes -= len(known.data)
        if len(media.data) > self._max_bytes:
            return
        self._kept[media.hash] = media
        self._num_bytes += len(media.data)
        while self._num_bytes > self._max_bytes:
            self._num_bytes -= len(self._kept.pop(next(iter(self._kept))).data)


class CrossAttention:
    """The audios that all tokens of a request read: `num_tokens` returns the number of tokens of so many samples.
    `step_budget`: as in `EncoderBlocks.has_room`."""

    def __init__(self, blocks: EncoderBlocks, num_tokens: Callable[[int], int], step_budget: int) -> None:
        self._blocks = blocks
        self._num_tokens = num_tokens
        self._step_budget = step_budget

    def of(self, audio: Audio) -> CrossAudio:
        return CrossAudio(audio, self._num_tokens(audio.num_samples), self._blocks, self._step_budget)


class Media:
    """All images and audios: their content on the host (`store`) and their encodings on the workers: in `cache` if they
    have tokens in the prompt, else in blocks, see `cross`.

    `attends_within`: an image's tokens attend to all of it, so one step computes them. Then an image must have few
    enough tokens for a step that computes one token of every other running request too.
    """

    def __init__(
        self,
        store: MediaStore | None = None,
        cache: EncoderCache | None = None,
        *,
        attends_within: bool = False,
        cross: CrossAttention | None = None,
    ) -> None:
        self.cache = cache or EncoderCache()
        self._store = store or MediaStore()
        self._attends_within = attends_within
        self._cross = cross

    def missing(self, media: Sequence[Image | Audio]) -> list[bytes]:
        """Return the hashes of those whose pixels or samples are neither given nor kept."""
        return self._store.missing(media)

    def of(self, request: EngineCoreRequest) -> RequestMedia:
        """Return the images and audios of an accepted request, none of which is missing. The request keeps their
        content until it ends."""
        if not request.media:
            return NO_MEDIA
        completed = self._store.complete(request.media)
        if self._cross:
            (audio,) = completed
            assert isinstance(audio, Audio), "check_request lets no image pass"
            return self._cross.of(audio)
        return PlacedMedia(completed, self.cache, attends_within=self._attends_within)
