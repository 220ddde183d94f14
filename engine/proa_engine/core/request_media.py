"""RequestMedia: what a request reads beside its tokens, and how many of its tokens a step can compute because of it."""

from bisect import bisect_right
from collections.abc import Sequence
from typing import Protocol

from proa.contract import Audio, Image, media_keys
from proa_engine.core.encoder_cache import EncoderCache
from proa_engine.core.types import MediaSpan

Keys = tuple[bytes | str, ...]


class Computed(Protocol):
    """The attributes of `Request` that are used here."""

    num_computed_tokens: int
    num_slots: int


class RequestMedia(Protocol):
    """Images or audio of one request."""

    spans: Sequence[MediaSpan]  # of what has tokens in the prompt, by ascending offset
    held: bytes | None  # hash of the image or audio of which a part is scheduled

    def extra_keys(self, keys: Keys, start: int, end: int) -> Keys:
        """Return the extra keys of the hash of the block with the tokens `start` … `end` - 1: `keys`, the request's,
        and what the block touches."""
        ...

    def limit(self, start: int, num_tokens: int) -> int:
        """Return how many of the `num_tokens` tokens from `start` the step can compute."""
        ...

    def uncut(self, position: int, num_tokens: int) -> int:
        """Return where the tokens of a request of `num_tokens` tokens can be computed up to: at `position`, or where
        that would not divide what one step must compute."""
        ...

    def claim(self, request: Computed, num_tokens: int) -> None:
        """Read in this step what the request's next `num_tokens` tokens need."""
        ...

    def free(self) -> None:
        """Drop references, when the request is preempted or has finished."""
        ...


class UnplacedMedia:
    """`RequestMedia` of a request none of whose tokens stand for an image or an audio."""

    spans: Sequence[MediaSpan] = ()
    held: bytes | None = None

    def extra_keys(self, keys: Keys, start: int, end: int) -> Keys:
        return keys

    def limit(self, start: int, num_tokens: int) -> int:
        return num_tokens

    def uncut(self, position: int, num_tokens: int) -> int:
        return position

    def claim(self, request: Computed, num_tokens: int) -> None:
        pass

    def free(self) -> None:
        pass


class PlacedMedia:
    """`RequestMedia` of the images and audios of a prompt, by ascending offset and all with pixels or samples. They are
    encoded in steps that compute their tokens. What is said of images here is true of audios too.

    `attends_within`: the tokens of an image attend to the whole image, so one step must compute them.
    """

    def __init__(self, media: Sequence[Image | Audio], cache: EncoderCache, *, attends_within: bool) -> None:
        self.spans: Sequence[MediaSpan] = tuple(
            MediaSpan(each.hash, each.offset, each.num_tokens, each.shape) for each in media
        )
        self.held: bytes | None = None  # hash of the image or audio of which a part is scheduled
        self._media = media
        self._ends = [each.end for each in media]
        self._cache = cache
        self._attends_within = attends_within

    def extra_keys(self, keys: Keys, start: int, end: int) -> Keys:
        return *keys, *media_keys(self._touching(start, end), start, end)

    def limit(self, start: int, num_tokens: int) -> int:
        """See `RequestMedia.limit`.

        They end before the first image that is not encoded and cannot be encoded in this step. With `attends_within`,
        they also end before an image whose last token is not among them.
        """
        end = start + num_tokens
        images = self._touching(start, end)
        num_available = self._cache.num_available(images)
        if num_available < len(images):
            end = max(images[num_available].offset, start)
        elif self._attends_within and images and images[-1].end > end:
            end = max(images[-1].offset, start)
        return end - start

    def uncut(self, position: int, num_tokens: int) -> int:
        """Return `position`, unless that is inside an image that one step must compute. Then return the image's end, or
        its begin if its last token is the request's, which must not be computed."""
        images = self._touching(position, position + 1)
        if not self._attends_within or not images or images[0].offset >= position:
            return position
        return images[0].end if images[0].end < num_tokens else images[0].offset

    def claim(self, request: Computed, num_tokens: int) -> None:
        """Read the images of the request's next `num_tokens` tokens in this step, and keep a reference to an image of
        which it computes only a part."""
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        images, before = self._touching(start, end), self.held
        self._cache.use(images, continues=before is not None)
        self.held = images[-1].hash if images and images[-1].end > end else None
        if self.held is not None:
            self._cache.touch(self.held)
        if before is not None:
            self._cache.free(before)
        if end < self._ends[-1]:
            request.num_slots = end  # so that its next step is not a plain decode, which reads no images

    def free(self) -> None:
        if self.held is not None:
            self._cache.free(self.held)
            self.held = None

    def _touching(self, start: int, end: int) -> Sequence[Image | Audio]:
        """Return the images that have tokens in `start` … `end` - 1."""
        first = last = bisect_right(self._ends, start)
        while last < len(self._media) and self._media[last].offset < end:
            last += 1
        return self._media[first:last]


NO_MEDIA = UnplacedMedia()
