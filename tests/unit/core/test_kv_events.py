"""KvChanges and the news of a core's steps: what is told, when, and what cancels out."""

from proa_engine.core.kv_events import KvChanges
from support.core import CoreRun, hash_block, make_request


def changes(*, stored: str = "", removed: str = "") -> KvChanges:
    return KvChanges(stored=dict.fromkeys(map(str.encode, stored)), removed=dict.fromkeys(map(str.encode, removed)))


def test_what_comes_and_goes_cancels_out() -> None:
    pending = changes(stored="ab")
    pending.merge(changes(stored="c", removed="a"))
    assert pending == changes(stored="bc")


def test_what_goes_and_comes_back_cancels_out() -> None:
    pending = changes(removed="ab")
    pending.merge(changes(stored="a"))
    assert pending == changes(removed="b")


def test_a_later_snapshot_replaces_all_that_waits() -> None:
    pending = changes(stored="a", removed="b")
    later = KvChanges.snapshot([b"c"])
    pending.merge(later)
    pending.merge(changes(stored="d", removed="c"))
    assert pending == KvChanges.snapshot([b"d"])
    assert later == KvChanges.snapshot([b"c"])


def test_an_empty_snapshot_says_something_and_no_changes_say_nothing() -> None:
    assert KvChanges.snapshot()
    assert not KvChanges()


def run_a(run: CoreRun, *prompt: int) -> None:
    run.submit(make_request("a", prompt, max_tokens=2))
    run.finish()


def test_nothing_is_kept_while_nobody_follows() -> None:
    run = CoreRun()
    run_a(run, *range(9))
    assert run.kv_events == []
    assert len(run.cached_hashes) == 2


def test_an_idle_core_sends_its_snapshot_at_once() -> None:
    run = CoreRun()
    run_a(run, *range(9))
    run.core.follow_kv_events()
    assert run.core.has_unfinished_requests()
    run.step()
    (batch,) = run.kv_events
    assert batch.snapshot is not None
    assert set(batch.snapshot) == run.cached_hashes
    assert not run.core.has_unfinished_requests()


def test_blocks_are_told_parents_first_even_by_a_step_without_tokens() -> None:
    run = CoreRun(max_num_batched_tokens=4)
    run.core.follow_kv_events()
    run.submit(make_request("a", range(13), max_tokens=2))
    run.steps(2)
    assert "a" not in run.outputs, "these steps compute chunks of the prompt"
    run.finish()
    stored = [block_hash for batch in run.kv_events for block_hash in batch.snapshot or batch.changes.stored]
    chain = [b"root"]
    for start in (0, 4, 8):
        chain.append(hash_block(chain[-1], range(start, start + 4), ()))
    assert stored == chain[1:]


def test_a_block_that_is_given_out_again_is_told_as_removed_in_that_step() -> None:
    run = CoreRun(num_blocks=4)
    run.core.follow_kv_events()
    run_a(run, *range(12))
    before = run.cached_hashes
    run.kv_events.clear()
    run_a(run, *range(20, 32))
    removed = {block_hash for batch in run.kv_events for block_hash in batch.changes.removed}
    assert removed == before - run.cached_hashes
    assert removed


def test_a_reset_is_a_snapshot_of_nothing() -> None:
    run = CoreRun()
    run.core.follow_kv_events()
    run_a(run, *range(9))
    run.kv_events.clear()
    run.core.reset_prefix_cache()
    run.step()
    assert [batch.changes for batch in run.kv_events] == [KvChanges.snapshot()]


def test_nothing_is_told_any_more_when_nobody_follows_any_more() -> None:
    run = CoreRun()
    run.core.follow_kv_events()
    run.step()
    run.core.unfollow_kv_events()
    run.kv_events.clear()
    run_a(run, *range(9))
    assert run.kv_events == []
