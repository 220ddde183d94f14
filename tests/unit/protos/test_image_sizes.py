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


def test_an_image_of_a_square_input_gets_its_side() -> None:
    assert resized(1, 10_000, SQUARE) == (224, 224)


@pytest.mark.parametrize("size", [(1, 201), (201, 1), (10, 2001)])
def test_an_image_that_is_too_long_is_refused(size: tuple[int, int]) -> None:
    with pytest.raises(ImageError, match="at most 200 times"):
        resized(*size, KEEPS_SHAPE)


def test_a_side_has_at_least_one_unit() -> None:
    assert resized(3000, 20, replace(KEEPS_SHAPE, max_pixels=64 * 64)) == (768, 32)
