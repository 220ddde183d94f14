"""Where images stand in a prompt's text and tokens."""

from dataclasses import replace

import pytest

from proa.contract import Image
from proa.image.limits import hash_image
from proa.image.placeholders import expand_placeholders, expand_token_ids, place_media
from support.image_files import KEEPS_SHAPE, SQUARE

IMAGE = KEEPS_SHAPE.token_id


def prepared(num_tokens: int) -> Image:
    pixels = bytes(32 * 32 * num_tokens * 3)
    return Image(
        hash=hash_image(pixels, 32, 32 * num_tokens),
        height=32,
        width=32 * num_tokens,
        num_tokens=num_tokens,
        pixels=pixels,
    )


def test_each_placeholder_becomes_the_tokens_of_its_image() -> None:
    images = prepared(2), prepared(1)
    assert expand_placeholders("a<image>b<image>", images, KEEPS_SHAPE) == "a<image><image>b<image>"


def test_the_prefix_and_the_suffix_surround_an_image() -> None:
    assert expand_placeholders("a<start>b", [prepared(2)], SQUARE) == "a\n\n<start><soft><soft><end>\n\nb"


@pytest.mark.parametrize("num_images", [0, 2])
def test_each_image_needs_a_placeholder(num_images: int) -> None:
    with pytest.raises(ValueError, match="1 times '<image>'"):
        expand_placeholders("a<image>b", [prepared(1)] * num_images, KEEPS_SHAPE)


def test_rows_of_an_images_tokens_may_have_a_token_between_them() -> None:
    input = replace(KEEPS_SHAPE, row_end="<row>", row_end_id=8)
    image = replace(prepared(1), height=3 * 32, width=2 * 32, num_tokens=input.num_tokens(3 * 32, 2 * 32))
    row, ids = "<image><image>", [IMAGE, IMAGE, 8, IMAGE, IMAGE, 8, IMAGE, IMAGE]
    assert expand_placeholders("a<image>b", [image], input) == f"a{row}<row>{row}<row>{row}b"
    assert expand_token_ids([1, IMAGE, 2], [image], input) == [1, *ids, 2]
    (placed,) = place_media([1, *ids, 2], [image], input)
    assert (placed.offset, placed.num_tokens) == (1, 8)
    with pytest.raises(ValueError, match="fewer"):
        place_media([1, *ids[:5], IMAGE, *ids[5:], 2], [image], input)


def test_images_get_the_offsets_of_their_tokens() -> None:
    token_ids = [1, IMAGE, IMAGE, 2, IMAGE, 3]
    first, second = place_media(token_ids, [prepared(2), prepared(1)], KEEPS_SHAPE)
    assert (first.offset, first.num_tokens, second.offset, second.num_tokens) == (1, 2, 4, 1)
    assert (first.hash, first.pixels, first.height, first.width) == (prepared(2).hash, prepared(2).pixels, 32, 64)


def test_images_may_touch() -> None:
    first, second = place_media([IMAGE] * 3, [prepared(2), prepared(1)], KEEPS_SHAPE)
    assert (first.offset, second.offset) == (0, 2)


@pytest.mark.parametrize("token_ids", [[], [1, 2], [IMAGE], [IMAGE, 1, IMAGE]])
def test_tokens_of_an_image_that_are_missing_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="fewer"):
        place_media(token_ids, [prepared(2)], KEEPS_SHAPE)


@pytest.mark.parametrize("token_ids", [[IMAGE] * 3, [IMAGE, IMAGE, 1, IMAGE]])
def test_tokens_outside_of_images_are_refused(token_ids: list[int]) -> None:
    with pytest.raises(ValueError, match="outside"):
        place_media(token_ids, [prepared(2)], KEEPS_SHAPE)


def test_a_prompt_without_images_has_none() -> None:
    assert place_media([1, 2], [], KEEPS_SHAPE) == ()
    assert expand_placeholders("text", (), KEEPS_SHAPE) == "text"
