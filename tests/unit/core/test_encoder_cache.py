"""EncoderCache: what is encoded, held, evicted and encoded again."""

import pytest

from proa.contract import Image
from proa_engine.core.encoder_cache import EncoderCache
from support.fake_images import make_image

A, B, C = (make_image(name, 4) for name in range(3))


def step(cache: EncoderCache, *images: Image) -> tuple[list[bytes], list[bytes]]:
    """Read these images in one step. Returns the hashes of those that it frees and of those that it encodes."""
    assert cache.num_available(images) == len(images)
    cache.use(images, continues=False)
    freed, inputs = cache.end_step(has_tokens=True)
    return freed, [image.hash for image in inputs]


def test_an_image_is_encoded_once_and_found_after_that() -> None:
    cache = EncoderCache(8, 8)
    assert step(cache, A) == ([], [A.hash])
    assert step(cache, A) == ([], [])
    assert (cache.num_encoded[Image], cache.num_hits[Image]) == (1, 1)


def test_two_requests_with_the_same_image_in_one_step_encode_it_once() -> None:
    cache = EncoderCache(4, 4)
    for _ in range(2):
        assert cache.num_available([A]) == 1
        cache.use([A], continues=False)
    _, inputs = cache.end_step(has_tokens=True)
    assert [image.hash for image in inputs] == [A.hash]
    cache.check_integrity([])


def test_the_least_recently_used_image_is_evicted_first() -> None:
    cache = EncoderCache(8, 8)
    step(cache, A)
    step(cache, B)
    step(cache, A)
    assert step(cache, C) == ([B.hash], [C.hash])
    assert step(cache, A) == ([], [])


def test_a_held_image_is_not_evicted() -> None:
    cache = EncoderCache(8, 8)
    step(cache, A)
    step(cache, B)
    cache.touch(A.hash)
    assert step(cache, C) == ([B.hash], [C.hash])
    cache.check_integrity([A.hash])
    assert cache.num_available([B, C]) == 1
    cache.end_step(has_tokens=False)
    cache.free(A.hash)
    assert step(cache, B) == ([A.hash], [B.hash])


def test_images_of_one_step_are_not_evicted_for_each_other() -> None:
    cache = EncoderCache(8, 8)
    step(cache, A)
    step(cache, B)
    assert step(cache, C, A) == ([B.hash], [C.hash])
    assert cache.num_available([A, B, C]) == 2


def test_a_cache_that_an_image_fills_exactly_takes_one_after_the_other() -> None:
    cache = EncoderCache(4, 4)
    assert step(cache, A) == ([], [A.hash])
    assert step(cache, B) == ([A.hash], [B.hash])
    assert step(cache, A) == ([B.hash], [A.hash])
    cache.check_integrity([])


def test_without_room_for_one_request_those_behind_it_get_none_in_this_step() -> None:
    cache, large = EncoderCache(8, 100), make_image(9, 8)
    step(cache, A)
    cache.touch(A.hash)
    assert cache.num_available([large]) == 0
    assert cache.num_available([B]) == 0
    assert cache.num_available([A]) == 1, "held images take no room"
    cache.end_step(has_tokens=False)
    assert cache.num_available([B]) == 1


def test_a_step_encodes_within_its_budget_or_one_image() -> None:
    cache, large = EncoderCache(100, 8), make_image(9, 20)
    assert cache.num_available([A, B, C]) == 2
    assert cache.num_available([large, A]) == 1
    assert cache.num_available([A, large]) == 1
    step(cache, A, B)
    assert cache.num_available([A, B, C, large]) == 3


def test_encodings_of_another_request_count_in_the_step() -> None:
    cache = EncoderCache(100, 8)
    cache.use([A, B], continues=False)
    assert cache.num_available([C]) == 0
    assert cache.num_available([A]) == 1


def test_a_step_without_tokens_keeps_what_is_to_be_freed_for_the_next() -> None:
    cache = EncoderCache(8, 8)
    step(cache, A)
    cache.reset()
    assert cache.end_step(has_tokens=False) == ([], [])
    assert step(cache, A) == ([A.hash], [A.hash])


def test_after_a_reset_a_held_image_is_encoded_again_without_further_room() -> None:
    cache = EncoderCache(4, 4)
    step(cache, A)
    cache.touch(A.hash)
    cache.reset()
    cache.reset()
    assert step(cache, A) == ([A.hash], [A.hash])
    cache.free(A.hash)
    cache.check_integrity([])


def test_an_image_released_after_a_reset_is_forgotten() -> None:
    cache = EncoderCache(4, 4)
    step(cache, A)
    cache.touch(A.hash)
    cache.reset()
    cache.free(A.hash)
    cache.check_integrity([])
    assert step(cache, B) == ([A.hash], [B.hash])


def test_after_clear_nothing_is_freed_and_all_is_encoded_again() -> None:
    cache = EncoderCache(4, 4)
    step(cache, A)
    cache.reset()
    cache.clear()
    assert step(cache, A) == ([], [A.hash])


@pytest.mark.parametrize("num_repeats", [2, 3])
def test_an_image_that_a_request_has_several_times_takes_room_once(num_repeats: int) -> None:
    cache = EncoderCache(4, 4)
    assert step(cache, *[A] * num_repeats) == ([], [A.hash])
