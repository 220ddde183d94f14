"""Requests whose tokens all read an audio: blocks of audios are shared, evicted and encoded again as a whole."""

from collections.abc import Sequence
from dataclasses import replace

from proa.contract import Audio, EngineCoreRequest
from proa_engine.core.kv.cache_groups import CacheGroups
from support.core import CoreRun, make_request
from support.fake_audio import CROSS_TOKENS, make_audio

COLUMNS = 4  # blocks of the longest audio
A, B, C = make_audio(1), make_audio(2), make_audio(3)


def cross_run(**options: int) -> CoreRun:
    return CoreRun(cross_tokens=CROSS_TOKENS, **options)  # type: ignore[arg-type]


def with_audio(request_id: str, audio: Audio, prompt: Sequence[int] = (1, 2, 3)) -> EngineCoreRequest:
    return replace(make_request(request_id, prompt), audios=(audio,))


def encoded(run: CoreRun) -> list[int]:
    """The number of audios that each step with tokens encodes."""
    return [len(plan.cross_inputs) for plan in run.executor.plans if not plan.is_empty]


def blocks_of(run: CoreRun) -> dict[str, list[int]]:
    """The blocks of each request's audio."""
    new = [each for plan in run.executor.plans for each in plan.new_requests]
    return {each.request_id: list(each.audio.block_ids) for each in new}


def test_requests_of_one_step_share_the_blocks_of_their_audio() -> None:
    run, requests = cross_run(), [with_audio("a", A), with_audio("b", A), with_audio("c", B)]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    blocks = blocks_of(run)
    assert blocks["a"] == blocks["b"]
    assert not set(blocks["a"]) & set(blocks["c"])
    assert encoded(run)[0] == 2
    assert (run.core.counters().audios.num_encoded, run.core.counters().audios.num_hits) == (2, 1)


def test_a_step_encodes_no_more_tokens_than_it_computes_but_for_a_single_audio() -> None:
    run = cross_run(max_num_batched_tokens=CROSS_TOKENS - 1)
    requests = [with_audio("a", A), with_audio("b", B), with_audio("c", B)]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert encoded(run)[:3] == [1, 1, 0]
    run.submit(with_audio("d", C), with_audio("e", A))  # the second one is encoded
    run.step()
    assert run.batches()[-1].keys() == {"d", "e"}
    run.finish()


def test_an_audio_is_found_after_its_request_has_ended() -> None:
    run = cross_run()
    for request_id in ("a", "b"):
        run.submit(with_audio(request_id, A))
        run.finish()
    assert sum(encoded(run)) == 1
    assert run.core.stats().kv_cache_usage == 0


def test_an_audio_of_which_a_block_is_evicted_is_encoded_again() -> None:
    run = cross_run(num_blocks=COLUMNS + 4)
    run.submit(with_audio("a", A))
    run.finish()
    run.submit(with_audio("b", B, range(12)))  # all blocks but one
    run.finish()
    assert not run.manager.encoder_blocks.cached.keys() & {A.hash}
    run.submit(with_audio("c", A))
    run.finish()
    run.assert_complete([with_audio("c", A)])
    assert run.core.counters().audios.num_encoded == 3


def test_the_other_blocks_of_an_evicted_audio_are_allocated_before_cached_ones() -> None:
    run = cross_run(num_blocks=2 * COLUMNS + 4)
    run.submit(with_audio("a", A))
    run.finish()
    run.submit(with_audio("b", B))
    run.finish()
    (free,) = {len(run.manager.encoder_blocks.cached[each.hash]) for each in (A, B)}
    pool = run.manager._device.blocks
    before = pool.num_free_blocks - 2 * free
    held = pool.get_new_blocks(before + 1)  # the first block of A is the next to be evicted
    assert run.manager.encoder_blocks.cached.keys() == {B.hash}
    held += pool.get_new_blocks(free - 1)
    assert run.manager.encoder_blocks.cached.keys() == {B.hash}
    pool.free_blocks(held)


def test_a_preempted_request_finds_its_audio_or_encodes_it_again() -> None:
    run = cross_run(num_blocks=2 * COLUMNS + 6)
    requests = [with_audio("a", A, range(8)), with_audio("b", B, range(8, 16))]
    run.submit(*requests)
    run.finish()
    run.assert_complete(requests)
    assert run.core.stats().num_preemptions > 0


def test_a_reset_forgets_audios_and_running_requests_keep_their_blocks() -> None:
    run, request = cross_run(), with_audio("a", A)
    run.submit(request)
    run.steps(2)
    run.reset_prefix_cache()
    run.step()
    run.submit(with_audio("b", A))
    run.finish()
    run.assert_complete([request])
    blocks = blocks_of(run)
    assert not set(blocks["a"]) & set(blocks["b"])


def test_a_prefix_is_found_with_the_same_audio_only() -> None:
    run, prompt = cross_run(), range(9)
    run.submit(with_audio("a", A, prompt))
    run.finish()
    run.submit(with_audio("b", A, prompt), with_audio("c", B, prompt))
    run.finish()
    assert [run.last(each).num_cached_tokens for each in ("b", "c")] == [8, 0]


def test_an_audio_without_samples_that_the_engine_lacks_is_asked_for() -> None:
    run = cross_run()
    without = replace(A, samples=b"")
    run.submit(with_audio("a", without))
    run.step()
    (rejection,) = run.rejections
    assert (rejection.code, rejection.missing_audios, rejection.missing_images) == ("failed_precondition", [A.hash], [])
    assert "has not kept 1 of the request's audios; send their samples" in rejection.message
    run.submit(with_audio("b", A))
    run.finish()
    run.submit(with_audio("c", without))
    run.finish()
    run.assert_complete([with_audio("b", A), with_audio("c", A)])


def test_the_longest_request_has_room_beside_the_longest_audio() -> None:
    groups = CacheGroups(num_blocks=10, block_size=4, cross_tokens=CROSS_TOKENS)
    assert groups.blocks_of(9) == COLUMNS + 3
    assert groups.capacity == 4 * (10 - COLUMNS)
    assert CacheGroups(num_blocks=COLUMNS, block_size=4, cross_tokens=CROSS_TOKENS).capacity == 0
