"""What the core has written to disk, and what it reads from there."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from proa.contract import KvFetch, KvSource
from proa_engine.core.kv.disk_tier import DiskTier
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.mover import DiskChanges
from proa_engine.core.kv_events import KvChanges
from proa_engine.core.request import Request, RequestStatus
from proa_engine.core.types import DiskCounts
from support.core import CoreRun, hash_block, make_request
from support.fake_disk import FakeDisk
from support.fake_mover import FakeMover, Never

PROMPT = tuple(range(1, 34))  # eight full blocks of 4, and one token
OTHER = tuple(range(40, 73))
PEER = KvSource(addresses=("peer:50061",))


def hashes(prompt: Sequence[int] = PROMPT) -> list[bytes]:
    parents = [b"root"]
    for start in range(0, len(prompt) - 4, 4):
        parents.append(hash_block(parents[-1], prompt[start : start + 4], []))
    return parents[1:]


def make_run(
    disk: FakeDisk | None = None, *, min_load_tokens: int = 1, windows: tuple[int, ...] = (), num_blocks: int = 12
) -> CoreRun:
    """A run whose device holds little more than one prompt, and which knows what the disk has."""
    host = HostTierConfig(num_pages=100, min_load_tokens=min_load_tokens)
    run = CoreRun(host=host, fetches=Never(), disk=disk or FakeDisk(), num_blocks=num_blocks, windows=windows)
    mover_of(run).advance(to_end=True)
    run.step()
    return run


def mover_of(run: CoreRun) -> FakeMover:
    assert run.mover is not None
    return run.mover


def on_disk(run: CoreRun) -> set[tuple[int, bytes]]:
    disk = mover_of(run).disk
    assert disk is not None
    return set(disk.contents.blocks)


def ask(run: CoreRun, request_id: str, prompt: Sequence[int] = PROMPT, cache_salt: str = "") -> int:
    """Run a request alone, until all that it brought about has ended. Returns its cached tokens."""
    run.submit(make_request(request_id, prompt, max_tokens=1, cache_salt=cache_salt))
    run.finish()
    for _ in range(3):
        run.step()
        mover_of(run).advance(to_end=True)
    run.step()
    return run.last(request_id).num_cached_tokens or 0


def written_disk() -> FakeDisk:
    """A disk that has the prompt, from an engine that has ended."""
    disk = FakeDisk()
    run = make_run(disk)
    ask(run, "a")
    ask(run, "b", OTHER)
    ask(run, "c")
    assert {(0, block_hash) for block_hash in hashes()} <= on_disk(run)
    return disk


def test_prompts_that_are_sent_once_are_not_written() -> None:
    run = make_run()
    for index in range(5):
        ask(run, f"{index}", range(index * 40, index * 40 + 33))
    assert not on_disk(run)


def test_a_prompt_that_comes_back_from_host_memory_is_written() -> None:
    run = make_run()
    ask(run, "a")
    ask(run, "b", OTHER)
    assert ask(run, "c") == 32
    assert on_disk(run) == {(0, block_hash) for block_hash in hashes()}
    ask(run, "d", OTHER[:20])
    ask(run, "e")
    disk = mover_of(run).disk
    assert disk is not None
    assert disk.num_written == 8 + 4, "each block is written once"


def test_prompts_with_a_cache_salt_are_not_written() -> None:
    run = make_run()
    ask(run, "a", cache_salt="secret")
    ask(run, "b", OTHER)
    assert ask(run, "c", cache_salt="secret") == 32
    assert not on_disk(run)


@pytest.mark.parametrize("reason", ["preempted", "fetched", "salted"])
def test_a_request_that_loads_its_own_blocks_has_nothing_written(reason: str) -> None:
    run = make_run()
    ask(run, "a")
    tier = run.manager.tiers.disk
    assert isinstance(tier, DiskTier)
    salt = "secret" if reason == "salted" else ""
    request = Request(make_request(cache_salt=salt), order=(0,), max_num_tokens=50, eos_token_ids=frozenset())
    if reason == "preempted":
        request.status = RequestStatus.PREEMPTED
    if reason == "fetched":
        request.fetch = KvFetch(0.0, 1.0, 32, 800)
    request.block_hashes = hashes()
    tier.keep(request, 32)
    mover_of(run).advance(to_end=True)
    assert not on_disk(run)


def test_a_later_engine_reads_what_is_on_disk() -> None:
    run = make_run(written_disk())
    request = make_request(prompt=PROMPT)
    run.submit(request)
    run.steps(3)
    (job,) = mover_of(run).jobs.values()
    assert job.addresses == ()
    assert (len(job.pages), job.num_held) == (8, 0)
    run.finish()
    run.assert_complete([request])
    last = run.last()
    assert last.num_cached_tokens == 32
    assert last.fetch is None, "gateways take it for a fetch from another engine"
    assert last.disk_read is not None
    assert last.disk_read.num_tokens == 32


def test_only_blocks_that_the_host_lacks_are_read() -> None:
    run = make_run(written_disk())
    run.submit(make_request("a", PROMPT[:13]))
    run.finish()
    run.submit(make_request("b", PROMPT))
    run.steps(2)
    (job,) = mover_of(run).jobs.values()
    assert (len(job.pages), job.num_held) == (5, 3)
    run.finish()


def test_fewer_tokens_than_the_least_load_are_not_read() -> None:
    run = make_run(written_disk(), min_load_tokens=33)
    run.submit(make_request(prompt=PROMPT))
    run.steps(2)
    assert not mover_of(run).jobs
    run.finish()


@pytest.mark.parametrize(("num_blocks", "is_disk"), [(3, True), (8, True), (0, False), (9, False)])
def test_another_engine_is_asked_if_it_has_more_than_the_disk(num_blocks: int, is_disk: bool) -> None:
    run = make_run(written_disk(), num_blocks=20)
    prompt = (*PROMPT, *OTHER)
    run.submit(replace(make_request(prompt=prompt), kv_source=replace(PEER, num_blocks=num_blocks)))
    run.steps(2)
    (job,) = mover_of(run).jobs.values()
    assert job.addresses == (() if is_disk else PEER.addresses)
    assert len(job.chain) == (8 if is_disk else num_blocks or 16)
    run.finish()


def test_two_requests_with_the_same_prompt_wait_for_one_read() -> None:
    run, requests = make_run(written_disk()), [make_request("a", PROMPT), make_request("b", PROMPT)]
    run.submit(*requests)
    run.steps(2)
    assert len(mover_of(run).jobs) == 1
    run.finish()
    run.assert_complete(requests)


def test_what_the_disk_has_lost_is_computed() -> None:
    disk = written_disk()
    run = make_run(disk)
    disk.remove((0, hashes()[3]))  # as a damaged block
    request = make_request(prompt=PROMPT)
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 12
    occupancy = run.core.counters().cache.disk
    assert occupancy is not None
    assert (occupancy.num_blocks, occupancy.reads.num_fetched_tokens) == (7, 12)


def test_a_reset_forgets_the_disk() -> None:
    run, request = make_run(written_disk()), make_request(prompt=PROMPT)
    run.reset_prefix_cache()
    run.submit(request)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 0
    assert not on_disk(run)


def test_a_reset_forgets_a_read_on_its_way() -> None:
    run, request = make_run(written_disk()), make_request(prompt=PROMPT)
    run.submit(request)
    run.steps(2)
    assert mover_of(run).jobs
    run.reset_prefix_cache()
    run.steps(1)
    run.finish()
    run.assert_complete([request])
    assert run.last().num_cached_tokens == 0


def test_a_checkpoint_on_disk_before_one_that_the_cache_has_is_not_read() -> None:
    run = make_run(windows=(6,), num_blocks=44)
    ask(run, "a")
    run.core.take_from_mover(
        DiskChanges(
            blocks=KvChanges.snapshot(hashes()), checkpoints=KvChanges.snapshot(hashes()[3:4]), counts=DiskCounts()
        )
    )
    run.submit(make_request("b", PROMPT))
    run.step()
    assert not mover_of(run).jobs
    run.finish()
    assert run.last("b").num_cached_tokens == 32


def test_windows_are_written_and_read_as_whole_checkpoints() -> None:
    disk = FakeDisk()
    run = make_run(disk, windows=(6,), num_blocks=22)
    run.submit(make_request("a", PROMPT, max_tokens=1))
    run.finish()
    ask(run, "b", OTHER)
    assert ask(run, "c") == 32
    assert set(disk.contents.checkpoints) == {hashes()[-1]}
    later, request = make_run(disk, windows=(6,), num_blocks=22), make_request(prompt=PROMPT)
    later.submit(request)
    later.steps(2)
    (job,) = mover_of(later).jobs.values()
    assert (job.needs_checkpoint, len(job.pages), list(map(len, job.tails))) == (True, 8, [2])
    later.finish()
    later.assert_complete([request])
    assert later.last().num_cached_tokens == 32
    disk.remove((1, hashes()[-1]))
    last = make_run(disk, windows=(6,), num_blocks=22)
    assert ask(last, "a") == 0, "without its checkpoint the prefix is of no use"
    assert last.core.counters().cache.disk is not None
