"""Requests with `prefill_only`: which blocks they compute, when they finish, and what other requests then find.

Blocks of four tokens.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from proa.contract import EngineCoreRequest, EventType, FinishReason, RepetitionDetectionParams
from proa_engine.core.kv.host_tier import HostTier, HostTierConfig
from support.core import CoreRun, make_request
from support.fake_grammar import fake_grammar
from support.fake_images import IMAGE_TOKEN, make_image

LONG = range(1, 42)  # ten full blocks and a token
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "windows": {"windows": (5, 9), "num_blocks": 100},
    "states": {"num_state_slots": 12},
    "states and windows": {"num_state_slots": 12, "windows": (6,), "num_blocks": 100},
}


def make_prefill(request_id: str = "a", prompt: Sequence[int] = LONG, **options: Any) -> EngineCoreRequest:
    return replace(make_request(request_id, prompt, **options), prefill_only=True)


def finish(run: CoreRun, *requests: EngineCoreRequest) -> list[dict[str, int]]:
    """Run requests to their ends. Returns the batches of their steps."""
    num_before = len(run.batches())
    run.submit(*requests)
    run.finish()
    for request in requests:
        if request.prefill_only:
            assert_finished(run, request)
        else:
            run.assert_complete([request])
    return run.batches()[num_before:]


def assert_finished(run: CoreRun, request: EngineCoreRequest) -> None:
    """The request has ended with one output and no token."""
    (output,) = run.outputs[request.request_id]
    assert output.finish_reason is FinishReason.STOP
    assert output.stop_reason is None
    assert not output.new_token_ids
    assert output.num_output_tokens == len(request.resumed_token_ids)
    assert output.num_prompt_tokens == len(request.prompt_token_ids)


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_tokens", "num_computed"), [(5, 4), (8, 4), (9, 8), (12, 8), (41, 40), (44, 40)])
def test_the_full_blocks_before_the_last_token_are_computed_and_found(
    num_tokens: int, num_computed: int, kind: str, async_scheduling: bool
) -> None:
    run = CoreRun(async_scheduling=async_scheduling, max_num_batched_tokens=64, **KINDS[kind])
    prompt = range(num_tokens)
    assert finish(run, make_prefill("a", prompt)) == [{"a": num_computed}]
    assert run.event_types("a") == [EventType.QUEUED, EventType.SCHEDULED, EventType.FINISHED]
    first, *_ = finish(run, make_request("b", prompt))
    assert first == {"b": num_tokens - num_computed}
    assert run.outputs["b"][0].num_cached_tokens == num_computed


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_in_chunks_finishes_with_the_result_of_the_last_chunk(kind: str, async_scheduling: bool) -> None:
    run = CoreRun(async_scheduling=async_scheduling, max_num_batched_tokens=13, **KINDS[kind])
    assert finish(run, make_prefill()) == [{"a": 13}, {"a": 13}, {"a": 13}, {"a": 1}]
    assert finish(run, make_request("b", LONG, max_tokens=1)) == [{"b": 1}]


def test_a_request_is_unfinished_until_its_last_step_has_ended() -> None:
    run = CoreRun(max_num_batched_tokens=20)
    run.submit(make_prefill())
    run.steps(2)
    assert len(run.batches()) == 2
    assert "a" not in run.outputs
    run.step()
    assert_finished(run, make_prefill())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_tokens", [1, 4, 41])
def test_a_cached_prompt_needs_no_step(kind: str, num_tokens: int) -> None:
    run = CoreRun(max_num_batched_tokens=64, **KINDS[kind])
    finish(run, make_prefill("a"))
    assert finish(run, make_prefill("b", LONG[:num_tokens])) == []
    assert run.event_types("b") == [EventType.QUEUED, EventType.FINISHED]
    assert run.last("b").num_cached_tokens == (num_tokens - 1) // 4 * 4


@pytest.mark.parametrize("kind", KINDS)
def test_equal_prompts_that_wait_are_computed_once(kind: str) -> None:
    run = CoreRun(max_num_batched_tokens=64, max_num_seqs=1, **KINDS[kind])
    prefills = [make_prefill(name) for name in "abc"]
    assert finish(run, *prefills, make_request("d", LONG, max_tokens=1)) == [{"a": 40}, {"d": 1}]


def test_a_longer_prompt_computes_only_what_is_missing() -> None:
    run = CoreRun(max_num_batched_tokens=64)
    finish(run, make_prefill("a", LONG[:20]))
    assert finish(run, make_prefill("b", LONG)) == [{"b": 24}]


@pytest.mark.parametrize("kind", KINDS)
def test_resumed_tokens_are_computed_too(kind: str) -> None:
    run = CoreRun(max_num_batched_tokens=64, **KINDS[kind])
    whole = make_request("b", LONG, max_tokens=20)
    resumed = run.expected(whole)[:10]
    request = replace(whole, resumed_token_ids=resumed)
    assert finish(run, replace(request, request_id="a", prefill_only=True)) == [{"a": 48}]
    assert finish(run, request)[0] == {"b": 3}


def test_sampling_parameters_have_no_effect() -> None:
    run = CoreRun(max_num_batched_tokens=64, num_speculative_tokens=3, accept=lambda num_drafts: num_drafts)
    params: list[dict[str, Any]] = [
        {"grammar": fake_grammar(seed=1, length=3)},
        {"stop_token_ids": (1, 2, 3), "max_tokens": 1},
        {"logprobs": 3},
        {"repetition_detection": RepetitionDetectionParams(max_pattern_size=1, min_count=2)},
    ]
    for index, each in enumerate(params):
        name = f"a{index}"
        assert finish(run, make_prefill(name, [index, *LONG], **each)) == [{name: 40}]
    assert not run.grammars.jobs
    assert run.executor.plans[-1].grammar_rows == []


def test_prefills_and_decodes_share_steps() -> None:
    run = CoreRun(max_num_batched_tokens=16)
    batches = finish(run, make_request("b", [50, 51], max_tokens=12), make_prefill("a"))
    assert batches[0] == {"b": 2, "a": 14}
    assert sum(batch.get("a", 0) for batch in batches) == 40


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_a_preempted_request_is_computed_again(kind: str, async_scheduling: bool) -> None:
    """There is room for the prompt and the first block of another request, which has a higher priority."""
    num_blocks = {"full": 12, "windows": 27, "states": 12, "states and windows": 20}[kind]
    options = {**KINDS[kind], "num_blocks": num_blocks, "async_scheduling": async_scheduling, "policy": "priority"}
    run = CoreRun(max_num_batched_tokens=12, max_model_len=48, **options)
    finish(run, make_request("b", [50, 51, 52], priority=-1, max_tokens=12), make_prefill())
    assert run.core.stats().num_preemptions == 1
    assert run.event_types().count(EventType.RESUMED) == 1
    assert finish(run, make_request("c", LONG, max_tokens=1)) == [{"c": 1}]


def test_an_aborted_request_ends_without_being_computed_further() -> None:
    run = CoreRun(max_num_batched_tokens=16)
    run.submit(make_prefill())
    run.steps(2)
    run.core.abort(["a"])
    run.finish()
    assert run.finish_reason() is FinishReason.ABORT
    assert len(run.batches()) <= 3


@pytest.mark.parametrize("kind", KINDS)
def test_the_salt_and_the_adapter_are_in_the_hashes(kind: str) -> None:
    run = CoreRun(max_num_batched_tokens=64, max_loras=1, max_cpu_loras=1, **KINDS[kind])
    run.load_lora("x")
    own: dict[str, Any] = {"lora_name": "x", "lora_digest": "x", "cache_salt": "s"}
    finish(run, make_prefill("a", **own))
    assert finish(run, make_prefill("b")) == [{"b": 40}]
    assert finish(run, make_request("c", LONG, max_tokens=1, **own)) == [{"c": 1}]


@pytest.mark.parametrize("attends_within", [False, True])
@pytest.mark.parametrize("num_behind", [0, 1, 2, 3, 4, 5, 9])
def test_the_images_of_the_blocks_are_encoded_and_not_cut(num_behind: int, attends_within: bool) -> None:
    """An image of nine tokens behind ten, and `num_behind` tokens behind it."""
    run = CoreRun(max_num_batched_tokens=64, encoder_cache_size=9, attends_within=attends_within)
    prompt = [*range(10), *[IMAGE_TOKEN] * 9, *range(num_behind)]
    images = (make_image(1, 9, 10),)
    last_boundary = (len(prompt) - 1) // 4 * 4
    end = last_boundary
    if attends_within and last_boundary < 19:
        end = 19 if num_behind else 10
    assert finish(run, replace(make_prefill("a", prompt), images=images)) == [{"a": end}]
    assert len(run.cached_hashes) == end // 4
    assert run.core.counters().images.num_encoded == (end > 10)
    first, *_ = finish(run, replace(make_request("b", prompt), images=images))
    assert first == {"b": len(prompt) - end // 4 * 4}


def run_with_host(kind: str, *, num_pages: int = 200, **options: Any) -> CoreRun:
    host = HostTierConfig(num_pages=num_pages, num_states=30, min_load_tokens=4)
    return CoreRun(max_num_batched_tokens=64, **{**KINDS[kind], "host": host, **options})


def evict(run: CoreRun) -> None:
    """Evict the device's cache by requests whose blocks are not cached."""
    for index in range(2):
        count = run.groups.num_blocks
        finish(run, *(make_request(f"evict {index} {each}", [60], max_tokens=2) for each in range(count)))
    assert not run.cached_hashes


@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("kind", KINDS)
def test_all_blocks_reach_host_memory(kind: str, async_scheduling: bool) -> None:
    run = run_with_host(kind, async_scheduling=async_scheduling)
    finish(run, make_prefill())
    blocks, checkpoints = run.hashes_in_host
    assert blocks == run.cached_hashes
    assert len(blocks) == 10
    assert checkpoints == run.checkpoints
    assert bool(checkpoints) is (kind != "full")


@pytest.mark.parametrize("kind", ["full", "windows"])
def test_a_prompt_in_host_memory_needs_neither_a_step_nor_a_load(kind: str) -> None:
    run = run_with_host(kind, num_blocks=60, max_num_seqs=64)
    finish(run, make_prefill())
    evict(run)
    assert run.executor.host is not None
    assert finish(run, make_prefill("b")) == []
    assert run.executor.host.num_loaded == 0
    assert finish(run, make_prefill("c", [*LONG, *range(9)])) == [{"c": 8}]
    assert run.executor.host.num_loaded > 0


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_that_only_the_device_has_are_stored_again(kind: str) -> None:
    run = run_with_host(kind)
    finish(run, make_prefill())
    run.manager.tiers.host.reset()
    assert run.hashes_in_host == (set(), set())
    assert finish(run, make_prefill("b")) == []
    assert (len(run.hashes_in_host[0]), run.hashes_in_host[1]) == (10, run.checkpoints)


@pytest.mark.parametrize("kind", KINDS)
def test_blocks_in_host_memory_that_are_asked_for_again_are_evicted_last(kind: str) -> None:
    """There is room for two of three prompts."""
    run = run_with_host(kind, num_blocks=200)
    finish(run, make_prefill("a"))
    held = run.manager.tiers.host
    assert isinstance(held, HostTier)
    num_pages = sum(page.cached_in is not None for page in held.pools.blocks.blocks)
    run = run_with_host(kind, num_blocks=200, num_pages=2 * num_pages)
    finish(run, make_prefill("a"))
    of_a = run.hashes_in_host
    finish(run, make_prefill("b", range(100, 141)))
    assert finish(run, make_prefill("a again")) == []
    finish(run, make_prefill("c", range(200, 241)))
    blocks, checkpoints = run.hashes_in_host
    assert of_a[0] <= blocks
    assert of_a[1] <= checkpoints
    assert len(blocks) == 20


def test_a_long_queue_does_not_delay_a_request_whose_blocks_are_cached() -> None:
    run = CoreRun(max_num_seqs=1)
    finish(run, make_prefill())
    run.submit(make_request("b"), make_request("c"), make_prefill("d"))
    run.step()
    assert_finished(run, make_prefill("d"))
    run.finish()
