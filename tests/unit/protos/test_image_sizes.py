"""The sizes to which images are resized."""

from dataclasses import replace

import pytest

from proa.image.limits import ImageError, resized
from support.image_files import KEEPS_SHAPE, SQUARE


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        ((64, 96), (64, 96)),
        ((70, 100), (64, 96)),
        ((48, 80), (64, 64)),  # halves go to the even number of units
        ((1, 1), (64, 64)),
        ((1, 200), (32, 928)),
        ((1000, 1000), (256, 256)),
        ((300, 3000), (64, 800)),
        ((15, 3000), (32, 928)),
    ],
)
def test_an_image_keeps_its_shape_within_the_limits(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized(*size, KEEPS_SHAPE) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1, 1), (32, 32)), ((256, 100), (256, 128)), ((1024, 300), (256, 96)), ((3, 600), (32, 256))],
)
def test_an_image_may_have_a_limit_of_its_longer_side(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized(*size, replace(KEEPS_SHAPE, min_pixels=0, max_pixels=0, max_side=256)) == expected


@pytest.mark.parametrize(
    ("size", "expected"),
    [((1, 1), (256, 256)), ((300, 600), (160, 352)), ((2000, 1000), (352, 160)), ((2, 390), (32, 2048))],
)
def test_an_image_may_fill_the_limit_of_pixels(size: tuple[int, int], expected: tuple[int, int]) -> None:
    assert resized(*size, replace(KEEPS_SHAPE, min_pixels=0, fills=True)) == expected


def test_an_image_of_a_square_input_gets_its_side() -> None:
    assert resized(1, 10_000, SQUARE) == (224, 224)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2001)])
def test_an_image_that_is_too_long_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at most 200 times"):
        resized(*size, KEEPS_SHAPE)


def test_a_side_has_at_least_one_unit() -> None:
    assert resized(3000, 20, replace(KEEPS_SHAPE, max_pixels=64 * 64)) == (768, 32)
