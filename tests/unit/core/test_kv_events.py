"""KvChanges, and the KV events in a core's step outputs."""

from proa_engine.core.kv_events import KvChanges, KvEventBatch, KvEvents
from proa_engine.core.operations import ResetPrefixCache
from support.core import CoreRun, hash_block, make_request


def changes(*, stored: str = "", removed: str = "") -> KvChanges:
    return KvChanges(stored=dict.fromkeys(map(str.encode, stored)), removed=dict.fromkeys(map(str.encode, removed)))


def test_storing_then_removing_cancels_out() -> None:
    pending = changes(stored="ab")
    pending.merge(changes(stored="c", removed="a"))
    assert pending == changes(stored="bc")


def test_removing_then_storing_cancels_out() -> None:
    pending = changes(removed="ab")
    pending.merge(changes(stored="a"))
    assert pending == changes(removed="b")


def test_a_later_snapshot_replaces_pending_changes() -> None:
    pending = changes(stored="a", removed="b")
    later = KvChanges.snapshot([b"c"])
    pending.merge(later)
    pending.merge(changes(stored="d", removed="c"))
    assert pending == KvChanges.snapshot([b"d"])
    assert later == KvChanges.snapshot([b"c"])


def test_an_empty_snapshot_is_true_and_no_changes_are_false() -> None:
    assert KvChanges.snapshot()
    assert not KvChanges()


def test_checkpoints_are_recorded_beside_the_blocks() -> None:
    blocks, checkpoints = {b"a": None, b"b": None}, {b"b": None}
    events = KvEvents(blocks.keys(), checkpoints.keys())
    events.checkpoints.store(b"x")
    assert events.take() is None, "no subscriber"
    events.follow()
    assert events.take() == KvEventBatch(KvChanges(), (b"a", b"b"), KvChanges(), (b"b",))
    assert not events.has_pending
    events.checkpoints.store(b"c")
    events.checkpoints.remove(b"b")
    assert events.has_pending
    assert events.take() == KvEventBatch(KvChanges(), None, changes(stored="c", removed="b"))
    events.reset()
    assert events.take() == KvEventBatch(KvChanges.snapshot(), None, KvChanges.snapshot())


def run_a(run: CoreRun, *prompt: int) -> None:
    run.submit(make_request("a", prompt, max_tokens=2))
    run.finish()


def test_nothing_is_recorded_without_a_subscriber() -> None:
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


def test_stored_blocks_are_sent_parents_first_even_by_a_step_without_tokens() -> None:
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


def test_a_reallocated_block_is_sent_as_removed_in_that_step() -> None:
    run = CoreRun(num_blocks=4)
    run.core.follow_kv_events()
    run_a(run, *range(12))
    before = run.cached_hashes
    run.kv_events.clear()
    run_a(run, *range(20, 32))
    removed = {block_hash for batch in run.kv_events for block_hash in batch.changes.removed}
    assert removed == before - run.cached_hashes
    assert removed


def test_a_reset_is_an_empty_snapshot() -> None:
    run = CoreRun()
    run.core.follow_kv_events()
    run_a(run, *range(9))
    run.kv_events.clear()
    run.core.operate(ResetPrefixCache())
    run.step()
    assert [batch.changes for batch in run.kv_events] == [KvChanges.snapshot()]


def test_nothing_is_sent_after_the_last_subscriber_left() -> None:
    run = CoreRun()
    run.core.follow_kv_events()
    run.step()
    run.core.unfollow_kv_events()
    run.kv_events.clear()
    run_a(run, *range(9))
    assert run.kv_events == []
