"""Requests with images in the core: chunks, hits, preemption, pixels by hash."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import pytest

from proa.blocks import hash_block, hash_blocks
from proa.contract import EngineCoreRequest, FinishReason, Image
from proa_engine.core.operations import Operation, ResetPrefixCache, Sleep, WakeUp
from support.core import CoreRun, make_pooled, make_request
from support.fake_grammar import fake_grammar
from support.fake_images import IMAGE_TOKEN, make_image

Part = int | Image


def with_images(request_id: str, parts: Sequence[Part], **params: object) -> EngineCoreRequest:
    """A request whose prompt is these tokens and images."""
    prompt, images = list[int](), list[Image]()
    for part in parts:
        if isinstance(part, Image):
            images.append(replace(part, offset=len(prompt)))
            prompt += [IMAGE_TOKEN] * part.num_tokens
        else:
            prompt.append(part)
    return replace(make_request(request_id, prompt, **params), images=tuple(images))  # type: ignore[arg-type]


def text(num_tokens: int, first: int = 0) -> list[Part]:
    return [(first + index) % 50 for index in range(num_tokens)]


def encoded(run: CoreRun) -> list[list[bytes]]:
    """The images that each step with tokens encodes."""
    return [[each.hash for each in plan.encoder_inputs] for plan in run.executor.plans if not plan.is_empty]


def freed(run: CoreRun) -> list[bytes]:
    return [image_hash for plan in run.executor.plans for image_hash in plan.freed_media]


def num_tokens(run: CoreRun, request_id: str) -> list[int]:
    """Of the request in each step that computes any, up to its first decode."""
    counts = [batch[request_id] for batch in run.batches() if request_id in batch]
    return counts[: counts.index(1)] if 1 in counts else counts


A, B, LARGE = make_image(1, 6), make_image(2, 6), make_image(3, 10)


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_an_image_across_chunks_is_encoded_once(async_scheduling: bool) -> None:
    run = CoreRun(max_num_batched_tokens=4, encoder_cache_size=10, async_scheduling=async_scheduling)
    request = with_images("a", [*text(3), LARGE, *text(4)])
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert num_tokens(run, "a") == [4, 4, 4, 4]
    assert encoded(run)[:4] == [[LARGE.hash], [], [], []]
    assert run.core.counters().images.num_hits == 0


def test_the_same_image_of_two_requests_in_one_step_is_encoded_once() -> None:
    run = CoreRun(encoder_cache_size=6)
    requests = [with_images("a", [*text(3), A, 1]), with_images("b", [*text(3, 20), A, 2])]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert encoded(run)[0] == [A.hash]
    assert run.core.counters().images.num_hits == 1


def test_a_chunk_ends_before_an_image_without_room_while_another_request_is_inside_one() -> None:
    run = CoreRun(max_num_batched_tokens=8, encoder_cache_size=10)
    inside, waits = with_images("a", [*text(2), LARGE, *text(2)]), with_images("b", [*text(1, 20), A, 5])
    run.submit(inside, waits)
    run.step()
    assert run.batches() == [{"a": 8}]
    run.step()
    assert run.batches()[1] == {"b": 1, "a": 6}, "it computes the token before the image"
    run.finish()
    run.assert_complete([inside, waits])
    assert encoded(run)[:3] == [[LARGE.hash], [], [A.hash]]
    assert freed(run) == [LARGE.hash]


def test_a_waiting_request_that_begins_with_an_image_without_room_stops_those_behind_it() -> None:
    run = CoreRun(max_num_batched_tokens=8, encoder_cache_size=10)
    requests = [with_images("a", [*text(2), LARGE, *text(2)]), with_images("b", [A, 5]), make_request("c")]
    run.submit(*requests)
    run.steps(2)
    assert run.batches() == [{"a": 8}, {"a": 6}]
    run.finish()
    run.assert_complete(requests)


def test_a_request_that_waits_for_room_is_not_passed_by_later_ones_with_many_images() -> None:
    """The others never end an image in the same step, so that there would be room for the large one only at the end."""
    run = CoreRun(max_num_batched_tokens=5, encoder_cache_size=12, num_blocks=100, policy="priority")
    images, large = [make_image(10 + index, 6) for index in range(12)], make_image(3, 12)
    others = [with_images("b", [*text(5), *images[::2]], priority=1), with_images("c", [1, *images[1::2]], priority=1)]
    run.submit(*others)
    run.steps(2)
    first = with_images("a", [*text(2), large, 1], priority=0)
    run.submit(first)
    run.finish()
    run.assert_complete([*others, first])
    order = [image_hash for of_step in encoded(run) for image_hash in of_step]
    assert order.index(large.hash) == 6


def test_a_preempted_request_releases_its_image_and_reads_it_again() -> None:
    run = CoreRun(num_blocks=8, max_num_batched_tokens=4, encoder_cache_size=10, enable_prefix_caching=False)
    early, late = make_request("a", range(9), max_tokens=20), with_images("b", [*text(2), LARGE, 3])
    run.submit(early)
    run.steps(3)
    run.submit(late)
    while run.core.stats().num_preemptions == 0:
        run.step()
    run.finish()
    run.assert_complete([early, late])
    assert run.executor.encodings.num_encoded == 1, "it is still encoded when the request resumes"


def test_a_hit_that_covers_an_image_needs_no_encoding() -> None:
    run = CoreRun(encoder_cache_size=10)
    first, other = with_images("a", [*text(2), A, *text(5)]), with_images("b", [*text(2, 20), LARGE, 1])
    second = with_images("c", [*text(2), A, *text(5), 9])
    for request in (first, other, second):
        run.submit(request)
        run.finish()
    run.assert_complete([first, other, second])
    assert run.last("c").num_cached_tokens == 12
    assert encoded(run).count([A.hash]) == 1
    assert freed(run) == [A.hash]


def test_a_hit_that_ends_inside_an_image_needs_its_encoding_again() -> None:
    run = CoreRun(encoder_cache_size=10)
    first, other = with_images("a", [*text(3), LARGE, *text(5)]), with_images("b", [*text(3, 30), A, 1])
    second = with_images("c", [*text(3), LARGE, *text(5, 9)])
    run.submit(first)
    run.finish()
    run.submit(other)
    run.finish()
    run.submit(second)
    run.finish()
    run.assert_complete([first, other, second])
    assert run.last("c").num_cached_tokens == 12, "the image's last token is in a block with other text"
    assert run.executor.encodings.num_encoded == 3
    assert freed(run) == [LARGE.hash, A.hash]


def test_prefixes_with_different_images_are_not_mixed_up() -> None:
    run = CoreRun(encoder_cache_size=12)
    requests = [with_images(name, [*text(2), image, *text(6)]) for name, image in (("a", A), ("b", B), ("c", A))]
    for request in requests:
        run.submit(request)
        run.finish()
    run.assert_complete(requests)
    assert [run.last(name).num_cached_tokens for name in "abc"] == [0, 0, 12]


def test_a_prompt_that_ends_with_an_image_of_one_token() -> None:
    one = make_image(7, 1)
    run = CoreRun(max_num_batched_tokens=6, encoder_cache_size=6)
    requests = [with_images("a", [A, *text(3)]), with_images("b", [*text(4, 20), one])]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)


def test_an_aborted_request_releases_its_image() -> None:
    run = CoreRun(max_num_batched_tokens=4, encoder_cache_size=10)
    request = with_images("b", [A, *text(3)])
    run.submit(with_images("a", [LARGE, *text(3)]), request)
    run.step()
    run.core.abort(["a"])
    run.finish()
    assert run.finish_reason("a") is FinishReason.ABORT
    run.assert_complete([request])


def test_with_attention_inside_images_one_step_computes_all_of_an_image() -> None:
    run = CoreRun(max_num_batched_tokens=14, max_num_seqs=4, encoder_cache_size=20, attends_within=True)
    requests = [with_images("a", [*text(9), LARGE, *text(2)]), with_images("b", [*text(3, 20), A, 1])]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert num_tokens(run, "a") == [9, 12]
    assert run.batches()[0] == {"a": 9, "b": 3}


@pytest.mark.parametrize("operations", [[ResetPrefixCache], [partial(Sleep, 1), WakeUp]])
def test_after_a_sleep_or_a_reset_images_are_encoded_again(operations: list[Callable[[], Operation[None]]]) -> None:
    run = CoreRun(encoder_cache_size=10)
    for name in "ab":
        request = with_images(name, [*text(2), A, *text(2)])
        run.submit(request)
        run.finish()
        run.assert_complete([request])
        for operation in operations:
            run.core.operate(operation())
            run.step()
    assert run.executor.encodings.num_encoded == 2


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_a_reset_in_the_middle_of_an_image_encodes_it_again(async_scheduling: bool) -> None:
    run = CoreRun(max_num_batched_tokens=4, encoder_cache_size=10, async_scheduling=async_scheduling)
    request = with_images("a", [LARGE, *text(2)])
    run.submit(request)
    run.step()
    run.core.operate(ResetPrefixCache())
    run.finish()
    run.assert_complete([request])
    assert encoded(run)[:3] == [[LARGE.hash], [LARGE.hash], []]


def test_requests_of_all_kinds_have_images() -> None:
    run = CoreRun(max_num_batched_tokens=5, encoder_cache_size=10, num_speculative_tokens=2, accept=lambda count: 1)
    parts = [*text(2), A, *text(3), B, 4]
    requests = [
        with_images("plain", parts),
        with_images("constrained", parts, grammar=fake_grammar()),
        with_images("logprobs", parts, prompt_logprobs=0),
        with_images("resumed", parts),
    ]
    requests[3] = replace(requests[3], resumed_token_ids=run.expected(requests[3])[:3])
    pooled = replace(make_pooled("pooled", requests[0].prompt_token_ids), images=requests[0].images)
    run.submit(*requests, pooled)
    run.finish()
    run.assert_complete(requests)
    run.assert_pooled(pooled)


def test_a_request_without_pixels_gets_those_that_were_kept() -> None:
    run = CoreRun(encoder_cache_size=10)
    first = with_images("a", [*text(2), A, 1])
    second = with_images("b", [*text(2, 20), replace(A, pixels=b""), 1])
    run.submit(first)
    run.finish()
    run.core.operate(ResetPrefixCache())
    run.submit(second)
    run.finish()
    run.assert_complete([first, second])


def test_a_request_whose_pixels_were_not_kept_is_rejected_with_their_hashes() -> None:
    run = CoreRun(encoder_cache_size=10, image_store_bytes=A.num_tokens * 3)
    run.submit(with_images("a", [A, 1]), with_images("b", [B, 1]))
    run.finish()
    missing = [replace(image, pixels=b"") for image in (A, B, LARGE, A)]
    run.submit(with_images("c", [*missing, 1]))
    run.finish()
    (rejection,) = run.rejections
    assert (rejection.request_id, rejection.code) == ("c", "failed_precondition")
    assert rejection.missing_images == [A.hash, LARGE.hash]


def test_pixels_of_an_image_are_needed_once_in_a_request() -> None:
    run = CoreRun(encoder_cache_size=10, image_store_bytes=0)
    request = with_images("a", [replace(A, pixels=b""), 1, A])
    run.submit(request)
    run.finish()
    run.assert_complete([request])


def test_kept_pixels_of_another_size_are_not_used() -> None:
    run = CoreRun(encoder_cache_size=10)
    run.submit(with_images("a", [A, 1]))
    run.finish()
    run.submit(with_images("b", [replace(A, pixels=b"", height=2, width=3), 1]))
    run.finish()
    assert [rejection.missing_images for rejection in run.rejections] == [[A.hash]]


def test_block_hashes_are_those_of_the_gateway() -> None:
    request = with_images("a", [*text(2), A, 1, B, *text(7)], cache_salt="salt")
    run = CoreRun(encoder_cache_size=12, hash_block=hash_block)
    run.submit(request)
    run.finish()
    hashes = hash_blocks(b"root", request.prompt_token_ids, 4, ["salt"], request.images)
    assert set(hashes) <= run.cached_hashes
