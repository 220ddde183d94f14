"""Random traffic with images over all kinds of caches: each token of an image is computed with its encoding at hand,
under pressure on both caches, and no request waits for ever.

`python tests/unit/core/test_images_fuzz.py 1000 2000` runs the seeds from 1000 to 1999.
"""

import random
import sys

import pytest

from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.operations import ResetPrefixCache
from support.core import CoreRun
from support.core_traffic import MAX_MODEL_LEN, Follower, Traffic, random_host
from support.thorough import seeds

BLOCK_SIZE = 4


def random_run(rng: random.Random, seed: int, *, attends_within: bool) -> tuple[CoreRun, list[tuple[int, int]]]:
    """A core whose caches hold little more than they must, and images that it can take."""
    windows = rng.choice([(), (), (5,), (3, 20)])
    has_states = rng.random() < 0.2
    drafts = rng.choice([0, 0, 1, 5])
    max_num_seqs, budget = rng.choice([1, 3, 8]), rng.choice([3, 16, 64])
    largest = rng.choice([3, 8, 20])
    if attends_within:
        budget = max(budget, largest + (max_num_seqs - 1) * (1 + drafts))
    sizes = CacheGroups(
        num_blocks=1, block_size=BLOCK_SIZE, windows=windows, max_step_tokens=max(budget, 2 * (1 + drafts))
    )
    run = CoreRun(
        num_blocks=sizes.blocks_of(MAX_MODEL_LEN - 1) + rng.choice([0, 1, rng.randint(2, 40)]),
        block_size=BLOCK_SIZE,
        windows=windows,
        num_state_slots=rng.choice([2, 3, max_num_seqs + 20]) if has_states else 0,
        checkpoint_interval=rng.choice([0, 4, 8, 16]),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=budget,
        async_scheduling=rng.random() < 0.5,
        policy=rng.choice(["fcfs", "priority"]),
        enable_prefix_caching=rng.random() < 0.8,
        num_speculative_tokens=drafts,
        accept=(lambda num_drafts: rng.randint(0, num_drafts)) if drafts else None,
        encoder_cache_size=largest + rng.choice([0, 1, rng.randint(0, 40)]),
        attends_within=attends_within,
        image_store_bytes=rng.choice([0, 40, 10_000]),
        **random_host(rng, seed),
    )
    return run, [(name, rng.choice([1, rng.randint(1, largest), largest])) for name in range(5)]


def drive(seed: int, *, attends_within: bool) -> CoreRun:
    """Random traffic until all requests have ended, with all checks after every step."""
    rng = random.Random(seed)
    run, kinds = random_run(rng, seed, attends_within=attends_within)
    traffic = Traffic(
        run,
        rng,
        60,
        0.1,
        rng.choice([0.0, 0.3]),
        follow_up_share=0.5,
        pooled_share=0.2,
        image_kinds=kinds,
        prefill_share=rng.choice([0.0, 0.4]),
    )
    follower = Follower(run, rng)

    def step() -> None:
        if rng.random() < 0.01:
            run.core.operate(ResetPrefixCache())
        follower.step()

    traffic.step = step
    traffic.drive()
    rejected = {rejection.request_id: rejection for rejection in run.rejections}
    assert run.outputs.keys() | rejected.keys() == traffic.requests.keys()
    for request_id, rejection in rejected.items():
        request = traffic.requests[request_id]
        if rejection.code == "failed_precondition":
            assert set(rejection.missing_images) <= {image.hash for image in request.images if not image.pixels}
        else:
            assert request.sampling_params.grammar is not None
    for request_id in run.outputs:
        traffic.check(traffic.requests[request_id])
    return run


@pytest.mark.parametrize("attends_within", [False, True])
def test_random_traffic_with_images(attends_within: bool) -> None:
    runs = [drive(seed, attends_within=attends_within) for seed in seeds(8, thorough=300)]
    images = [run.core.counters().images for run in runs]
    assert sum(each.num_encoded for each in images) == sum(run.executor.encodings.num_encoded for run in runs) > 50
    assert sum(each.num_hits for each in images) > 20
    assert sum(run.executor.encodings.num_freed for run in runs) > 20
    assert sum(run.core.stats().num_preemptions for run in runs) > 0


def main(first: int, end: int) -> None:
    for attends_within in (False, True):
        encoded = hits = preemptions = 0
        for seed in range(first, end):
            try:
                core = drive(seed, attends_within=attends_within).core
            except AssertionError as error:
                print(f"{attends_within}, seed {seed}: {error}", flush=True)
                raise
            images = core.counters().images
            encoded, hits = encoded + images.num_encoded, hits + images.num_hits
            preemptions += core.stats().num_preemptions
        print(f"{attends_within}: {end - first} runs, {encoded} encoded, {hits} hits, {preemptions} preemptions")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
