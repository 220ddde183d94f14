"""ImageLoader: the prepared images of a request, from their URLs. Decodes on threads of its own."""

import asyncio
import hashlib
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Hashable, Iterable
from concurrent.futures import Executor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Generic, Protocol, TypeVar

from proa.contract import Audio, Image, ImageInput
from proa.contract.session import MAX_MESSAGE_BYTES, MAX_TEXT_MESSAGE_BYTES
from proa.image.limits import ImageError
from proa.image.prepare import num_pixels, prepare_image
from proa_gateway.errors import InvalidRequest, Overloaded
from proa_gateway.images.config import ImageOptions
from proa_gateway.images.fetch import is_data_url, read_data_url
from proa_gateway.observability.telemetry import GatewayTracer

T = TypeVar("T")
M = TypeVar("M", Image, Audio)
MIN_LARGE = 16_000_000
"""Pixels of an image that is large. One of them is decoded at a time: decoding takes up to 20 bytes a pixel, and a
second for the largest."""
MAX_PROMPT_BYTES = MAX_MESSAGE_BYTES - MAX_TEXT_MESSAGE_BYTES
"""Pixels of a prompt, in bytes. A message with more would end the session with the engine."""
MAX_WAITING_BYTES = 256 * 1024 * 1024  # of files that wait to be decoded


@dataclass(frozen=True, slots=True)
class ImageKey:
    digest: bytes  # SHA-256 of the file
    input: ImageInput  # how the model's images are prepared


class MediaCache(Generic[M]):
    """Prepared images or audios, by file and model. Drops what was used longest ago, to keep within `max_bytes` of
    pixels or samples."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._media: OrderedDict[Hashable, M] = OrderedDict()  # least recently used first
        self.num_bytes = 0  # of pixels or samples

    def get(self, key: Hashable) -> M | None:
        found = self._media.get(key)
        if found is not None:
            self._media.move_to_end(key)
        return found

    def add(self, key: Hashable, media: M) -> None:
        if key in self._media:
            return
        self._media[key] = media
        self.num_bytes += len(media.data)
        while self.num_bytes > self._max_bytes:
            self.num_bytes -= len(self._media.popitem(last=False)[1].data)


@dataclass(frozen=True, slots=True)
class ImageSource:
    url: str  # maybe a `data:` URL
    param: str  # where the request has it, for errors: messages.0.content.1.image_url


class Fetcher(Protocol):
    async def fetch(self, url: str) -> bytes:
        """Raises `ImageError` and `Overloaded`."""
        ...


class Metrics(Protocol):
    def observe_image(self, outcome: str, seconds: float) -> None: ...


class ImageLoader:
    """Equal images that are prepared at the same time are prepared once."""

    def __init__(
        self,
        options: ImageOptions,
        *,
        fetcher: Fetcher,
        executor: Executor,
        metrics: Metrics,
        tracer: GatewayTracer,
    ) -> None:
        self._options = options
        self._fetcher = fetcher
        self._executor = executor
        self._metrics = metrics
        self._tracer = tracer
        self._cache = MediaCache[Image](options.image_cache_bytes)
        self._pending: dict[ImageKey, asyncio.Task[Image]] = {}  # images that are being prepared
        self._large = asyncio.Semaphore(1)  # held while a large image is prepared
        self._num_waiting_bytes = 0  # of files that wait to be decoded, or are being decoded
        self._num_held_bytes = 0  # of prepared images, whose requests wait for others

    async def load(self, sources: Iterable[ImageSource], input: ImageInput) -> tuple[Image, ...]:
        """Return the images in the order of `sources`. Takes at most one more of them than are allowed. Raises
        `InvalidRequest`, which names the first image that is not used, or `Overloaded`."""
        limit = self._options.limit_mm_per_prompt.image
        first = list(islice(sources, limit + 1))
        if len(first) > limit:
            raise InvalidRequest(f"At most {limit} images may be in one prompt.", param=first[limit].param)
        with self._tracer.part("images", {"proa.num_images": len(first)}):
            held: list[int] = []
            tasks = [asyncio.create_task(self._load(source, input, held)) for source in first]
            try:
                return tuple([await task for task in tasks])
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._num_held_bytes -= sum(held)

    async def _load(self, source: ImageSource, input: ImageInput, held: list[int]) -> Image:
        """`held`: bytes of each of the request's images that are prepared, to which this one is added."""
        started = time.perf_counter()
        outcome = "cancelled"
        try:
            image, outcome = await self._get(source.url, input)
            self._hold(image, held)
            if sum(held) > MAX_PROMPT_BYTES:
                raise ImageError(f"the images of a prompt may have {MAX_PROMPT_BYTES} bytes of pixels, these have more")
            return image
        except ImageError as error:
            outcome = "refused"
            message = str(error)
            raise InvalidRequest(f"{message[0].upper()}{message[1:]}.", param=source.param) from error
        except Overloaded:
            outcome = "overloaded"
            raise
        finally:
            self._metrics.observe_image(outcome, time.perf_counter() - started)

    async def _get(self, url: str, input: ImageInput) -> tuple[Image, str]:
        """The image, and whether it was `cached` or `prepared`."""
        if is_data_url(url):
            data = await self._run(lambda: read_data_url(url, self._options.max_image_bytes))
        else:
            data = await self._fetcher.fetch(url)
        key = ImageKey(await self._run(lambda: hashlib.sha256(data).digest()), input)
        if (image := self._cache.get(key)) is not None:
            return image, "cached"
        # Shielded: other requests may wait for the same task.
        return await asyncio.shield(self._pending.get(key) or self._start(key, data)), "prepared"

    def _hold(self, image: Image, held: list[int]) -> None:
        """Raises `Overloaded`, but not for a request that is the only one with prepared images."""
        num_bytes, limit = len(image.pixels), self._options.max_image_memory
        if self._num_held_bytes > sum(held) and self._num_held_bytes + num_bytes > limit:
            raise Overloaded(f"The server is at its limit of {limit} bytes of images.", limit="images")
        held.append(num_bytes)
        self._num_held_bytes += num_bytes

    def _start(self, key: ImageKey, data: bytes) -> asyncio.Task[Image]:
        task = self._pending[key] = asyncio.create_task(self._prepare(key, data))
        task.add_done_callback(lambda _: self._ended(key, task))
        return task

    def _ended(self, key: ImageKey, task: asyncio.Task[Image]) -> None:
        del self._pending[key]
        if not task.cancelled():
            task.exception()  # marks it as seen: all who waited may be gone

    async def _prepare(self, key: ImageKey, data: bytes) -> Image:
        limits = self._options.limits
        async with self._waiting(len(data)):
            is_large = await self._run(lambda: num_pixels(data, limits)) > MIN_LARGE
            async with self._large if is_large else nullcontext():
                image = await self._run(lambda: prepare_image(data, key.input, limits))
        self._cache.add(key, image)
        return image

    @asynccontextmanager
    async def _waiting(self, num_bytes: int) -> AsyncIterator[None]:
        """Raises `Overloaded`."""
        if self._num_waiting_bytes + num_bytes > MAX_WAITING_BYTES:
            raise Overloaded("Too many images wait to be decoded.")
        self._num_waiting_bytes += num_bytes
        try:
            yield
        finally:
            self._num_waiting_bytes -= num_bytes

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)
