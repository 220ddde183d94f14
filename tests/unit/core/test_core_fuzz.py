"""Random traffic under memory pressure: correct tokens, no leaked block, no starved request."""

import random
from typing import Any, Literal

import pytest

from proa_engine.core.operations import ResetPrefixCache
from support.core import CoreRun
from support.core_traffic import MAX_MODEL_LEN, Follower, Traffic, random_host, random_schedule
from support.thorough import seeds

Policy = Literal["fcfs", "priority"]


def random_run(
    rng: random.Random, *, async_scheduling: bool, policy: Policy, num_speculative_tokens: int = 0, **others: Any
) -> CoreRun:
    num_blocks = rng.choice([15, 16, 20, 40])  # of 4 tokens: one of the longest requests, up to three
    return CoreRun(
        num_blocks=num_blocks,
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=rng.choice([1, 3, 8, 16]),
        max_num_batched_tokens=rng.choice([3, 16, 64]),
        async_scheduling=async_scheduling,
        policy=policy,
        enable_prefix_caching=rng.random() < 0.8,
        block_order=rng.sample(range(num_blocks), num_blocks),
        num_speculative_tokens=num_speculative_tokens,
        accept=(lambda num_drafts: rng.randint(0, num_drafts)) if num_speculative_tokens else None,
        **others,
    )


def check_random_traffic(
    seed: int, *, embeds_share: float = 0.0, follow_up_share: float = 0.0, **settings: Any
) -> CoreRun:
    rng = random.Random(seed)
    settings["draft_schedule"] = random_schedule(seed, settings.get("num_speculative_tokens", 0))
    run = random_run(rng, **settings, **random_host(rng, seed))
    pooled_share, grammar_share = (0.3, 0.4) if seed % 2 else (0.0, 0.0)
    traffic = Traffic(
        run,
        rng,
        num_requests=150,
        abort_share=0.1,
        grammar_share=grammar_share,
        pooled_share=pooled_share,
        prefill_share=0.2,
        embeds_share=embeds_share,
        follow_up_share=follow_up_share,
    )
    traffic.drive()
    rejected = {rejection.request_id: rejection for rejection in run.rejections}
    assert run.outputs.keys() | rejected.keys() == traffic.requests.keys()
    assert not run.outputs.keys() & rejected.keys()
    for request_id, rejection in rejected.items():
        grammar = traffic.requests[request_id].sampling_params.grammar
        assert grammar is not None
        assert rejection.code == {"invalid": "invalid_argument", "busy": "resource_exhausted"}[grammar.text]
    for request_id in run.outputs:
        traffic.check(traffic.requests[request_id])
    return run


@pytest.mark.parametrize("num_speculative_tokens", [0, 1, 5])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", seeds(2, thorough=6))
def test_random_traffic_under_memory_pressure(
    seed: int, async_scheduling: bool, policy: Policy, num_speculative_tokens: int
) -> None:
    check_random_traffic(
        seed, async_scheduling=async_scheduling, policy=policy, num_speculative_tokens=num_speculative_tokens
    )


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("policy", ["fcfs", "priority"])
@pytest.mark.parametrize("seed", seeds(3, thorough=8))
def test_random_traffic_over_pipeline_stages(seed: int, policy: Policy, num_stages: int) -> None:
    check_random_traffic(seed, async_scheduling=True, policy=policy, num_stages=num_stages)


@pytest.mark.parametrize(("async_scheduling", "num_speculative_tokens"), [(True, 0), (False, 3)])
def test_random_traffic_with_prompt_embeddings(async_scheduling: bool, num_speculative_tokens: int) -> None:
    settings: dict[str, Any] = {"async_scheduling": async_scheduling, "policy": "fcfs", "embeds_share": 0.6}
    settings |= {"num_speculative_tokens": num_speculative_tokens, "follow_up_share": 0.3}
    num_hits = num_resumed = 0
    for seed in seeds(4, thorough=20):
        executor = check_random_traffic(3 + seed, **settings).executor
        seen = set[str]()
        for new in (new for plan in executor.plans for new in plan.new_requests):
            if embeds := executor.prompt_embeds.get(new.request_id):
                num_hits += new.num_computed_tokens > embeds[0].offset
                num_resumed += new.request_id in seen
                seen.add(new.request_id)
    assert num_hits > 10, "embeddings are found in the prefix cache"
    assert num_resumed > 0, "requests with embeddings are preempted"


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("seed", seeds(3, thorough=6))
def test_replayed_kv_events_equal_the_cache_after_every_step(seed: int, async_scheduling: bool) -> None:
    rng = random.Random(seed)
    num_blocks = rng.choice([15, 16, 20, 40])
    run = CoreRun(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN, async_scheduling=async_scheduling)
    traffic, follower = Traffic(run, rng, num_requests=150, abort_share=0.1), Follower(run, rng)

    def step() -> None:
        if rng.random() < 0.01:
            run.core.operate(ResetPrefixCache())
        follower.step()

    traffic.step = step
    traffic.drive()
    assert follower.num_changes > 20


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_memory_pressure_really_preempts_and_shares(async_scheduling: bool) -> None:
    rng = random.Random(1)
    run = CoreRun(num_blocks=16, max_model_len=MAX_MODEL_LEN, async_scheduling=async_scheduling)
    Traffic(run, rng, num_requests=150, abort_share=0.0).drive()
    stats = run.core.stats()
    assert stats.num_preemptions > 20
    assert stats.prefix_cache_hits > 50


@pytest.mark.parametrize("seed", range(3))
def test_same_tokens_as_an_unpressured_run(seed: int) -> None:
    tokens = []
    for num_blocks in (15, 400):
        rng = random.Random(seed)
        run = CoreRun(num_blocks=num_blocks, max_model_len=MAX_MODEL_LEN)
        traffic = Traffic(run, rng, num_requests=50, abort_share=0.0, grammar_share=0.3)
        traffic.drive()
        tokens.append({request_id: run.tokens(request_id) for request_id in traffic.requests})
        assert (run.core.stats().num_preemptions > 0) is (num_blocks == 15)
    assert tokens[0] == tokens[1]


@pytest.mark.parametrize("seed", range(3))
def test_fcfs_starts_no_request_before_an_earlier_one(seed: int) -> None:
    rng = random.Random(seed)
    run = random_run(rng, async_scheduling=True, policy="fcfs")
    traffic = Traffic(run, rng, num_requests=100, abort_share=0.0)
    traffic.drive()
    for resumed in (True, False):  # those that another engine has begun go first
        requests = (name for name, request in traffic.requests.items() if bool(request.resumed_token_ids) is resumed)
        starts = [run.events(name)[1].timestamp for name in requests]
        assert starts == sorted(starts)
