"""The gateway's images: from URLs to prepared images, with a cache and bounds."""

import asyncio
from base64 import b64encode
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from PIL import Image

from proa.image.limits import ImageError, ImageLimits
from proa.image.prepare import prepare_image
from proa_gateway.errors import InvalidRequest, Overloaded
from proa_gateway.images import loader as loader_module
from proa_gateway.images.config import ImageOptions, PromptLimit
from proa_gateway.images.loader import ImageLoader, ImageSource
from proa_gateway.observability.telemetry import GatewayTracer
from support.image_files import KEEPS_SHAPE, SQUARE, encoded, random_image

FILE = encoded(random_image("RGB", 80, 90), "PNG")
LARGE_FILE = encoded(Image.new("1", (4100, 4100)), "PNG")


def source(data: bytes, param: str = "messages.0.content.0.image_url") -> ImageSource:
    return ImageSource(f"data:image/png;base64,{b64encode(data).decode()}", param)


class FakeFetcher:
    async def fetch(self, url: str) -> bytes:
        if url != "https://example.com/a.png":
            raise ImageError("the image's server answered with status 404")
        return FILE


class Metrics:
    def __init__(self) -> None:
        self.outcomes: Counter[str] = Counter()

    def observe_image(self, outcome: str, seconds: float) -> None:
        self.outcomes[outcome] += 1


class Loader:
    def __init__(self, executor: ThreadPoolExecutor) -> None:
        self.executor = executor
        self.metrics = Metrics()

    def make(self, *, fetcher: FakeFetcher | None = None, **options: Any) -> ImageLoader:
        return ImageLoader(
            ImageOptions(**options),
            fetcher=fetcher or FakeFetcher(),
            executor=self.executor,
            metrics=self.metrics,
            tracer=GatewayTracer(),
        )


@pytest.fixture
def made() -> Iterator[Loader]:
    with ThreadPoolExecutor(2) as executor:
        yield Loader(executor)


async def test_images_come_in_the_order_of_their_sources(made: Loader) -> None:
    fetched = ImageSource("https://example.com/a.png", "b")
    other = encoded(random_image("RGB", 64, 64), "PNG")
    images = await made.make().load([source(other), fetched], KEEPS_SHAPE)
    assert images == tuple(prepare_image(data, KEEPS_SHAPE, ImageLimits()) for data in (other, FILE))
    assert made.metrics.outcomes == {"prepared": 2}


async def test_an_image_that_is_refused_names_its_place_in_the_request(made: Loader) -> None:
    sources = [source(FILE, "messages.0.content.0.image_url"), source(b"<svg/>", "messages.0.content.1.image_url")]
    with pytest.raises(InvalidRequest, match=r"The image is not a file of the formats PNG, .*\.") as caught:
        await made.make().load(sources, KEEPS_SHAPE)
    assert caught.value.param == "messages.0.content.1.image_url"
    assert made.metrics.outcomes["refused"] == 1


async def test_an_image_that_cannot_be_fetched_is_an_invalid_request(made: Loader) -> None:
    with pytest.raises(InvalidRequest, match="answered with status 404"):
        await made.make().load([ImageSource("https://example.com/b.png", "p")], KEEPS_SHAPE)


async def test_a_prompt_with_too_many_images_is_refused(made: Loader) -> None:
    loader = made.make(limit_mm_per_prompt=PromptLimit(1))
    await loader.load([source(FILE, "first")], KEEPS_SHAPE)
    with pytest.raises(InvalidRequest, match="At most 1 images may be in one prompt") as caught:
        await loader.load([source(FILE, "first"), source(FILE, "second")], KEEPS_SHAPE)
    assert caught.value.param == "second"


async def test_a_prompt_with_more_pixels_than_a_message_may_have_is_refused(
    made: Loader, monkeypatch: pytest.MonkeyPatch
) -> None:
    loader = made.make()
    (image,) = await loader.load([source(FILE)], KEEPS_SHAPE)
    monkeypatch.setattr(loader_module, "MAX_PROMPT_BYTES", len(image.pixels))
    await loader.load([source(FILE)], KEEPS_SHAPE)
    with pytest.raises(InvalidRequest, match=r"The images of a prompt may have \d+ bytes of pixels") as caught:
        await loader.load([source(FILE, "first"), source(FILE, "second")], KEEPS_SHAPE)
    assert caught.value.param in ("first", "second")  # the one that was prepared last


async def test_an_image_sent_again_is_not_decoded_again(made: Loader) -> None:
    loader = made.make()
    (first,) = await loader.load([source(FILE)], KEEPS_SHAPE)
    (second,) = await loader.load([source(FILE)], KEEPS_SHAPE)
    assert second is first
    assert made.metrics.outcomes == {"prepared": 1, "cached": 1}


async def test_an_image_for_another_model_is_decoded_again(made: Loader) -> None:
    loader = made.make()
    await loader.load([source(FILE)], KEEPS_SHAPE)
    (square,) = await loader.load([source(FILE)], SQUARE)
    assert (square.height, square.width) == (224, 224)


async def test_the_cache_keeps_the_images_used_last_within_its_bytes(made: Loader) -> None:
    loader = made.make(image_cache_bytes=2 * 224 * 224 * 3)
    files = [encoded(random_image("L", 10, 10, seed), "PNG") for seed in range(3)]
    for index in (0, 1, 0, 2, 0, 1):  # the second is dropped for the third
        await loader.load([source(files[index])], SQUARE)
    assert made.metrics.outcomes == {"prepared": 4, "cached": 2}


async def test_equal_images_at_the_same_time_are_decoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bytes] = []

    def counted(data: bytes, *args: Any) -> Any:
        calls.append(data)
        return prepare_image(data, *args)

    monkeypatch.setattr(loader_module, "prepare_image", counted)
    with ThreadPoolExecutor(1) as executor:  # One thread hashes all eight files before it decodes the first.
        loader = Loader(executor).make(image_cache_bytes=0)
        images = await loader.load([source(FILE)] * 8, KEEPS_SHAPE)
    assert len(set(map(id, images))) == len(calls) == 1


async def test_one_large_image_is_decoded_at_a_time(made: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    running: list[bytes] = []
    most_running = []

    def watched(data: bytes, *args: Any) -> Any:
        running.append(data)
        most_running.append(len(running))
        try:
            return prepare_image(data, *args)
        finally:
            running.remove(data)

    monkeypatch.setattr(loader_module, "prepare_image", watched)
    files = [LARGE_FILE + bytes([number]) for number in range(3)]
    await made.make().load([source(data) for data in files], SQUARE)
    assert most_running == [1, 1, 1]


async def test_files_that_wait_are_bounded(made: Loader, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader_module, "MAX_WAITING_BYTES", len(FILE) - 1)
    with pytest.raises(Overloaded, match="Too many images wait"):
        await made.make().load([source(FILE)], KEEPS_SHAPE)
    assert made.metrics.outcomes == {"overloaded": 1}


async def test_a_client_that_leaves_does_not_stop_the_image_of_another(made: Loader) -> None:
    loader = made.make()
    first = asyncio.create_task(loader.load([source(LARGE_FILE)], SQUARE))
    second = asyncio.create_task(loader.load([source(LARGE_FILE)], SQUARE))
    await asyncio.sleep(0)
    first.cancel()
    (image,) = await second
    assert (image.height, image.width) == (224, 224)


@pytest.mark.parametrize("text", ["", "3", "[]", '{"video": 1}', '{"image": -1}', '{"image": "1"}', '{"image": true}'])
def test_a_limit_that_is_not_one_of_images_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"JSON|number"):
        PromptLimit.from_json(text)


def test_the_limit_of_images_is_as_vllm_writes_it() -> None:
    assert PromptLimit.from_json('{"image": 3}') == PromptLimit(3)
    assert PromptLimit.from_json('{"audio": 3}') == PromptLimit(16, 3)
    assert PromptLimit.from_json(str(PromptLimit())) == PromptLimit(16)


async def test_images_that_wait_for_others_of_their_requests_are_bounded(made: Loader) -> None:
    class Gate(FakeFetcher):
        opened = asyncio.Event()

        async def fetch(self, url: str) -> bytes:
            await self.opened.wait()
            return FILE

    loader = made.make(fetcher=Gate(), max_image_memory=3 * 224 * 224 * 3)
    files = [encoded(random_image("L", 10, 10, seed), "PNG") for seed in range(4)]
    slow = ImageSource("https://example.com/a.png", "b")
    first = asyncio.create_task(loader.load([*map(source, files[:2]), slow], SQUARE))
    while made.metrics.outcomes["prepared"] < 2:  # noqa: ASYNC110
        await asyncio.sleep(0)
    await loader.load([source(files[2])], SQUARE)
    with pytest.raises(Overloaded):
        await loader.load([source(files[2]), source(files[3])], SQUARE)
    Gate.opened.set()
    assert len(await first) == 3
    assert len(await loader.load([*map(source, files), slow], SQUARE)) == 5
