"""Random traffic over all kinds of caches: full attention, windows, recurrent states, both, and audios that all tokens
read.

`python tests/unit/core/test_cache_groups_fuzz.py 1000 2000` runs the seeds from 1000 to 1999.
"""

import random
import sys
from dataclasses import dataclass
from typing import Final, Literal

import pytest

from proa_engine.core.kv.cache_groups import CacheGroups
from support.core import CoreRun
from support.core_traffic import MAX_MODEL_LEN, Follower, Traffic, random_host, random_schedule
from support.fake_audio import CROSS_TOKENS
from support.thorough import seeds

Kind = Literal["full", "window", "windows", "state", "state and window", "cross", "cross and window"]
KINDS: Final[tuple[Kind, ...]] = (
    "full",
    "window",
    "windows",
    "state",
    "state and window",
    "cross",
    "cross and window",
)
BLOCK_SIZE = 4


def random_windows(rng: random.Random, kind: Kind) -> tuple[int, ...]:
    count = rng.randint(2, 3) if kind == "windows" else int(kind.endswith("window"))
    return tuple(rng.choice([2, 3, 5, rng.randint(2, 100)]) for _ in range(count))


def random_run(rng: random.Random, kind: Kind, seed: int) -> CoreRun:
    """A core whose cache holds little more than the longest request."""
    windows, has_states = random_windows(rng, kind), kind.startswith("state")
    drafts = rng.choice([0, 1, 5])
    max_num_seqs, budget = rng.choice([1, 3, 8, 16]), rng.choice([3, 16, 64])
    cross_tokens = CROSS_TOKENS if kind.startswith("cross") else 0
    sizes = CacheGroups(
        num_blocks=1,
        block_size=BLOCK_SIZE,
        windows=windows,
        cross_tokens=cross_tokens,
        max_step_tokens=max(budget, 2 * (1 + drafts)),
    )
    return CoreRun(
        num_blocks=sizes.blocks_of(MAX_MODEL_LEN - 1) + rng.choice([0, 1, rng.randint(2, 40)]),
        block_size=BLOCK_SIZE,
        windows=windows,
        num_state_slots=rng.choice([2, 3, max_num_seqs + 1, max_num_seqs + 20]) if has_states else 0,
        cross_tokens=cross_tokens,
        checkpoint_interval=rng.choice([0, 4, 8, 16]),
        min_junction=rng.choice([4, 8, 16, 256]),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        async_scheduling=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.9,
        num_speculative_tokens=drafts,
        draft_schedule=random_schedule(seed, drafts),
        accept=(lambda num_drafts: rng.randint(0, num_drafts)) if drafts else None,
        **random_host(rng, seed),
    )


def drive(seed: int, kind: Kind, source: CoreRun | None = None) -> CoreRun:
    """Random traffic until all requests have ended, with all checks after every step.

    `source`: a run of the same seed, from which blocks are fetched.
    """
    rng = random.Random(f"{kind} {seed}")
    run = random_run(rng, kind, seed)
    if run.mover is not None and source is not None and source.mover is not None:
        run.mover.learn(source.mover)
    grammar_share, num_requests = rng.choice([0.0, 0.3]), rng.choice([20, 60])
    has_audio = kind.startswith("cross")
    pooled_share = 0.3 if seed % 3 == 0 and not has_audio else 0.0
    prefill_share = 0.0 if has_audio else rng.choice([0.0, 0.4])
    traffic = Traffic(
        run,
        rng,
        num_requests,
        0.1,
        grammar_share,
        follow_up_share=0.5,
        pooled_share=pooled_share,
        prefill_share=prefill_share,
        retention=random.Random(f"{kind} {seed}") if seed % 2 else None,
        has_audio=has_audio,
    )
    follower = Follower(run, rng)
    reset_share = rng.choice([0.0, 0.005, 0.03])

    def step() -> None:
        if rng.random() < reset_share:
            run.reset_prefix_cache()
        follower.step()

    traffic.step = step
    traffic.drive()
    for request_id in run.outputs:
        traffic.check(traffic.requests[request_id])
    if run.mover is not None and source is None and run.executor.weights_epoch == 0:
        return drive(seed, kind, run)
    return run


@dataclass
class Totals:
    """Sums over runs."""

    runs: int = 0
    with_host: int = 0
    retained_blocks: int = 0  # at the end
    hit_tokens: int = 0
    preemptions: int = 0
    stored_pages: int = 0
    loaded_pages: int = 0
    fetched_pages: int = 0
    written_pages: int = 0
    read_tokens: int = 0  # from disk
    encoded_audios: int = 0
    encoded_audio_hits: int = 0

    def add(self, run: CoreRun) -> None:
        stats, counters, host = run.core.stats(), run.core.counters(), run.core.counters().cache.host
        self.runs += 1
        self.retained_blocks += stats.num_retained_blocks
        self.hit_tokens += stats.prefix_cache_hits
        self.preemptions += stats.num_preemptions
        self.encoded_audios += counters.audios.num_encoded
        self.encoded_audio_hits += counters.audios.num_hits
        self.fetched_pages += 0 if run.mover is None else run.mover.num_fetched
        if run.mover is not None and run.mover.disk is not None:
            self.written_pages += run.mover.disk.num_written
        if (disk := run.core.counters().cache.disk) is not None:
            self.read_tokens += disk.reads.num_fetched_tokens
        if host is not None:
            self.with_host += 1
            self.stored_pages += host.num_stored_pages
            self.loaded_pages += host.num_loaded_pages


@pytest.mark.parametrize("kind", KINDS)
def test_random_traffic_over_every_kind_of_cache(kind: Kind) -> None:
    totals = Totals()
    for seed in seeds(9, thorough=100):
        totals.add(drive(seed, kind))
    assert totals.with_host > 0
    assert totals.retained_blocks > 0
    assert totals.hit_tokens > 20
    assert totals.preemptions > 0
    assert totals.stored_pages > 20
    has_audio = kind.startswith("cross")
    assert (totals.encoded_audios > 0) is (totals.encoded_audio_hits > 0) is has_audio


def main(first: int, end: int) -> None:
    for kind in KINDS:
        totals = Totals()
        for seed in range(first, end):
            try:
                totals.add(drive(seed, kind))
            except AssertionError as error:
                print(f"{kind}, seed {seed}: {error}", flush=True)
                raise
        print(f"{kind}: {totals}", flush=True)


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
