"""Blocks of sessions are evicted after all others, until their streams release them or end."""

from dataclasses import replace

from proa.contract import EngineCoreRequest
from proa_engine.core.operations import EndStream
from support.core import CoreRun, hash_block, make_request

ONE, TWO = 1, 2  # streams


def prompt(name: int, num_tokens: int = 17) -> list[int]:
    """Of four full blocks of 4 tokens and one more token."""
    return [name] * num_tokens


def retaining(request_id: str, name: int, client_index: int = ONE, **others: object) -> EngineCoreRequest:
    request = make_request(request_id, prompt(name), max_tokens=1, client_index=client_index)
    return replace(request, retain=True, **others)  # type: ignore[arg-type]


def passing(request_id: str, name: int, **others: object) -> EngineCoreRequest:
    return replace(make_request(request_id, prompt(name), max_tokens=1), **others)  # type: ignore[arg-type]


def run_of(num_blocks: int = 12, **settings: int | tuple[int, ...]) -> CoreRun:
    return CoreRun(num_blocks=num_blocks, **settings)  # type: ignore[arg-type]


def serve(run: CoreRun, *requests: EngineCoreRequest) -> None:
    """One after the other."""
    for request in requests:
        run.submit(request)
        run.finish()


def hashes_of(prompt: list[int]) -> list[bytes]:
    """Of its full blocks."""
    hashes = [b"root"]
    for start in range(0, len(prompt) - 3, 4):
        hashes.append(hash_block(hashes[-1], prompt[start : start + 4], ()))
    return hashes[1:]


def cached(run: CoreRun, request_id: str) -> int:
    """Tokens of the request that were found in the cache."""
    return run.last(request_id).num_cached_tokens or 0


def test_blocks_of_residents_are_evicted_last() -> None:
    run = run_of()
    serve(run, retaining("a", 1), *[passing(f"p{name}", name) for name in (2, 3, 4, 5)], passing("again", 1))
    assert cached(run, "again") == 16
    assert run.core.stats().num_retained_blocks == 4


def test_what_nobody_retains_is_evicted_in_its_order() -> None:
    run = run_of()
    serve(run, passing("a", 1), *[passing(f"p{name}", name) for name in (2, 3, 4, 5)], passing("again", 1))
    assert cached(run, "again") == 0
    assert run.core.stats().num_retained_blocks == 0


def test_residents_give_way_if_nothing_else_is_left() -> None:
    run = run_of()
    serve(run, retaining("a", 1), retaining("b", 2), retaining("c", 3), passing("again", 3))
    assert cached(run, "again") == 16
    assert run.core.stats().num_retained_blocks <= 12
    run.core.check_integrity()


def test_released_blocks_are_evicted_next_the_last_one_first() -> None:
    run = run_of()
    serve(run, retaining("a", 1))
    hashes = hashes_of(prompt(1))
    # 8 blocks are free without content; the released ones are taken before these, from their end
    run.submit(passing("b", 2, client_index=ONE, released=hashes[2:]))
    run.finish()
    assert run.core.stats().num_retained_blocks == 2
    assert run.cached_hashes.isdisjoint(hashes[2:])
    serve(run, passing("again", 1))
    assert cached(run, "again") == 8


def test_only_its_own_stream_releases_a_block() -> None:
    run = run_of()
    serve(run, retaining("a", 1, ONE), retaining("same", 1, TWO))
    hashes = hashes_of(prompt(1))
    serve(run, passing("b", 2, client_index=TWO, released=hashes))
    assert run.core.stats().num_retained_blocks == 4
    serve(run, passing("c", 3, client_index=ONE, released=[*hashes, b"unknown"]))
    assert run.core.stats().num_retained_blocks == 0


def test_marks_vanish_with_their_gateway() -> None:
    run = run_of()
    serve(run, retaining("a", 1, ONE), retaining("b", 2, TWO))
    run.core.operate(EndStream(ONE))
    run.step()
    assert run.core.stats().num_retained_blocks == 4
    assert set(hashes_of(prompt(1))) <= run.cached_hashes  # they stay cached until room is needed
    serve(run, *[passing(f"p{name}", name) for name in (3, 4, 5)], passing("first", 1), passing("second", 2))
    assert (cached(run, "first"), cached(run, "second")) == (0, 16)


def test_a_reset_of_the_cache_ends_all_retention() -> None:
    run = run_of()
    serve(run, retaining("a", 1))
    run.reset_prefix_cache()
    run.step()
    assert run.core.stats().num_retained_blocks == 0


def test_a_preempted_residents_blocks_are_retained() -> None:
    run = run_of(num_blocks=10, max_model_len=40)
    first = make_request("first", prompt(1, 9), max_tokens=30)
    run.submit(first, replace(make_request("second", prompt(2, 9), max_tokens=20), client_index=ONE, retain=True))
    run.finish()
    assert run.core.stats().num_preemptions > 0
    assert run.core.stats().num_retained_blocks > 0


def test_of_checkpoints_the_last_one_is_retained() -> None:
    """The states of earlier ones may go, since the next turn continues at the last."""
    run = run_of(num_blocks=64, num_state_slots=8)
    serve(run, retaining("a", 1))
    longer = replace(make_request("b", prompt(1, 33), max_tokens=1, client_index=ONE), retain=True)
    serve(run, longer)
    [last] = [slot for slot in run.manager._device.states.blocks if slot.owners]
    assert last.block_hash == hashes_of(prompt(1, 33))[-1]
