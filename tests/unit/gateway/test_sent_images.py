"""Which images are sent with pixels."""

from proa.contract import Image
from proa_gateway.engines.session import MIN_BYTES, SentImages


def image(name: bytes, num_bytes: int = 1) -> Image:
    return Image(hash=name, num_tokens=1, height=1, width=1, pixels=b"x" * num_bytes)


def with_pixels(sent: SentImages, *images: Image) -> list[bytes]:
    """The hashes of the images that are sent with pixels."""
    return [each.hash for each in sent.strip(images) if each.pixels]


def test_an_image_is_sent_with_pixels_once() -> None:
    sent = SentImages()
    assert with_pixels(sent, image(b"a"), image(b"b"), image(b"a")) == [b"a", b"b"]
    assert with_pixels(sent, image(b"b"), image(b"c")) == [b"c"]


def test_a_forgotten_image_is_sent_with_pixels_again() -> None:
    sent = SentImages()
    sent.strip([image(b"a"), image(b"b")])
    sent.forget([b"a", b"unknown"])
    assert with_pixels(sent, image(b"a"), image(b"b")) == [b"a"]


def test_the_images_used_last_are_known_up_to_a_size() -> None:
    sent = SentImages(max_bytes=4 * MIN_BYTES)
    sent.strip([image(b"a"), image(b"b", 2 * MIN_BYTES), image(b"c"), image(b"a")])
    assert with_pixels(sent, image(b"d"), image(b"a"), image(b"c")) == [b"d"]
    assert with_pixels(sent, image(b"b")) == [b"b"]


def test_an_image_larger_than_all_that_is_kept_is_always_sent() -> None:
    sent = SentImages(max_bytes=MIN_BYTES)
    assert with_pixels(sent, image(b"a", 2 * MIN_BYTES), image(b"a", 2 * MIN_BYTES)) == [b"a", b"a"]
