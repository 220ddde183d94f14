"""Greedy tokens of a real model equal those of `transformers`, for 30 prompts and every way to schedule them."""

from collections.abc import Sequence
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.json_configs import SpeculativeConfig
from support import real_model, real_texts
from support.engine import Engine, Result, build_core, request, run
from support.real_model import Record

NUM_TOKENS = 16
SECONDS = 600.0  # far more than a run takes
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
CONFIG: dict[str, Any] = {"max_model_len": 1600, "max_num_seqs": 30, "max_num_batched_tokens": 512}
ROOM = 400  # blocks of 16 tokens: for a long prompt and all short ones
PRESSED = 125  # for a long prompt and some of the short ones
NARROW = 101  # for one long prompt
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=2)


@pytest.fixture(scope="session")
def long() -> list[list[int]]:
    return real_texts.long_prompts(real_model.tokenizer())


@pytest.fixture(scope="session")
def short() -> list[list[int]]:
    return real_texts.short_prompts(real_model.tokenizer())


def ask(engine: Engine, prompts: Sequence[list[int]]) -> list[Result]:
    """All prompts at once; the results in their order."""
    requests = [request(str(index), prompt, PARAMS) for index, prompt in enumerate(prompts)]
    return list(run(engine, requests, seconds=SECONDS).values())


def compare(prompts: Sequence[list[int]], results: Sequence[Result]) -> str:
    """Assert that the tokens are those of `transformers`. Returns how many are, for the report."""
    judged = [
        real_model.judge(tuple(prompt), tuple(result.token_ids))
        for prompt, result in zip(prompts, results, strict=True)
    ]
    wrong = [index for index, each in enumerate(judged) if each.num_wrong]
    assert not wrong, f"tokens of prompts {wrong} are not those of transformers"
    num_equal, num_close = (
        sum(each) for each in zip(*((each.num_equal, each.num_close) for each in judged), strict=True)
    )
    assert num_equal + num_close == NUM_TOKENS * len(prompts)
    text = f"{num_equal} of {NUM_TOKENS * len(prompts)} tokens equal"
    return text + (f", {num_close} as likely" if num_close else "")


def test_tokens_of_prompts_alone(short: list[list[int]], long: list[list[int]], record: Record) -> None:
    prompts = [*short, long[0]]
    with build_core(real_model.FOLDER, num_gpu_blocks_override=ROOM, **CONFIG) as engine:
        results = [ask(engine, [prompt])[0] for prompt in prompts]
    record("greedy tokens, one prompt after the other", compare(prompts, results))


def test_tokens_of_prompts_in_one_batch_then_with_cached_prefixes(
    short: list[list[int]], long: list[list[int]], record: Record
) -> None:
    prompts = [*short, long[1]]
    with build_core(real_model.FOLDER, num_gpu_blocks_override=ROOM, poison=True, block_seed=1, **CONFIG) as engine:
        batched, cached = ask(engine, prompts), ask(engine, prompts)
    record("… in one batch, prompts in chunks of 512 tokens", compare(prompts, batched))
    num_cached = sum(result.num_cached_tokens for result in cached)
    assert num_cached > real_texts.LONG_TOKENS
    record("… again, from cached prefixes", f"{compare(prompts, cached)}; {num_cached:,} tokens of prompts cached")


def test_tokens_of_prompts_that_are_preempted(short: list[list[int]], long: list[list[int]], record: Record) -> None:
    prompts = [long[2], *short]
    with build_core(real_model.FOLDER, num_gpu_blocks_override=PRESSED, poison=True, block_seed=2, **CONFIG) as engine:
        results = ask(engine, prompts)
        num_preemptions = engine.core.stats().num_preemptions
    assert num_preemptions > 0
    figures = f"{compare(prompts, results)}; {num_preemptions} preemptions"
    record(f"… in one batch, with a KV cache of {16 * PRESSED:,} tokens", figures)


def test_ngram_drafts_change_no_token(short: list[list[int]], long: list[list[int]], record: Record) -> None:
    prompts = [*short, long[3]]
    with build_core(
        real_model.FOLDER, num_gpu_blocks_override=ROOM, speculative_config=DRAFTS, poison=True, **CONFIG
    ) as engine:
        results = ask(engine, prompts)
        counters = engine.core.counters()
    accepted, drafted = counters.drafts.num_accepted_tokens, counters.drafts.num_draft_tokens
    assert 0 < accepted < drafted
    record(
        "… in one batch, with n-gram drafts", f"{compare(prompts, results)}; {accepted} of {drafted} drafts accepted"
    )


def test_blocks_that_come_back_from_host_memory_change_no_token(long: list[list[int]], record: Record) -> None:
    """Two long prompts in turn, twice, on a device with room for one of them."""
    prompts = [long[0], long[3]] * 2
    with build_core(
        real_model.FOLDER, num_gpu_blocks_override=NARROW, kv_offloading_size=1.0, poison=True, **CONFIG
    ) as engine:
        results = [ask(engine, [prompt])[0] for prompt in prompts]
        host = engine.core.counters().cache.host
    assert host is not None
    assert host.num_loaded_tokens > 1.5 * real_texts.LONG_TOKENS  # some blocks are still on the device
    figures = f"{compare(prompts, results)}; {host.num_loaded_tokens:,} tokens loaded"
    record("… of two long prompts, from host memory", figures)
