"""Which images are sent with pixels, and which audios with samples."""

from proa.contract import Audio, EngineCoreRequest, Image, SamplingParams
from proa_gateway.engines.session import MIN_BYTES, SentMedia


def image(name: bytes, num_bytes: int = 1) -> Image:
    return Image(hash=name, num_tokens=1, height=1, width=1, pixels=b"x" * num_bytes)


def with_pixels(sent: SentMedia, *images: Image) -> list[bytes]:
    """The hashes of the images that are sent with pixels."""
    return [each.hash for each in sent.strip(request(*images)).images if each.pixels]


def request(*images: Image, audios: tuple[Audio, ...] = ()) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r", prompt_token_ids=[1], sampling_params=SamplingParams(), images=images, audios=audios
    )


def test_an_image_is_sent_with_pixels_once() -> None:
    sent = SentMedia()
    assert with_pixels(sent, image(b"a"), image(b"b"), image(b"a")) == [b"a", b"b"]
    assert with_pixels(sent, image(b"b"), image(b"c")) == [b"c"]


def test_a_forgotten_image_is_sent_with_pixels_again() -> None:
    sent = SentMedia()
    sent.strip(request(image(b"a"), image(b"b")))
    sent.forget([b"a", b"unknown"])
    assert with_pixels(sent, image(b"a"), image(b"b")) == [b"a"]


def test_the_images_used_last_are_known_up_to_a_size() -> None:
    sent = SentMedia(max_bytes=4 * MIN_BYTES)
    sent.strip(request(image(b"a"), image(b"b", 2 * MIN_BYTES), image(b"c"), image(b"a")))
    assert with_pixels(sent, image(b"d"), image(b"a"), image(b"c")) == [b"d"]
    assert with_pixels(sent, image(b"b")) == [b"b"]


def test_an_image_larger_than_all_that_is_kept_is_always_sent() -> None:
    sent = SentMedia(max_bytes=MIN_BYTES)
    assert with_pixels(sent, image(b"a", 2 * MIN_BYTES), image(b"a", 2 * MIN_BYTES)) == [b"a", b"a"]


def test_an_audio_is_sent_with_samples_once() -> None:
    sent, audios = SentMedia(), tuple(Audio(hash=name, num_samples=1, samples=b"abcd") for name in (b"a", b"b", b"a"))
    assert [each.samples for each in sent.strip(request(audios=audios)).audios] == [b"abcd", b"abcd", b""]
    sent.forget([b"b"])
    assert [each.samples for each in sent.strip(request(audios=audios)).audios] == [b"", b"abcd", b""]
