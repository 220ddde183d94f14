"""A model with recurrent layers behind `LLM`: fewer requests where states need the memory, and every kind of output."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa_engine import LLM, SamplingParams, StructuredOutputsParams
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import load_engine
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.server.loaded_engine import make_model_info
from support.tiny_models import make_tiny_model

CONFIG: dict[str, Any] = {"dtype": "float32", "device": "cpu", "max_model_len": 128, "max_num_batched_tokens": 64}
STATE_BYTES, INPUT_BYTES = 23_424, 1_760  # of one request, and of one token
CACHE_BYTES = 300_000
DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 3,
    "num_speculative_tokens_per_batch_size": [[1, 16, 3]],  # otherwise chosen by time
}
GREEDY = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
PROMPTS = ["The sea", "A boat with two unlike hulls that are of unequal length", "Why?", "One, two, three"] * 3


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("states"), "qwen3_5_text", seed=3)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    llm = LLM(str(folder), num_gpu_blocks_override=64, max_num_seqs=16, **CONFIG)
    yield llm
    llm.llm_engine.shutdown()


def test_fewer_requests_run_where_states_would_take_more_than_half(folder: Path, llm: LLM) -> None:
    lines: list[str] = []
    config = EngineConfig.from_options(model=str(folder), kv_cache_memory_bytes=CACHE_BYTES, **CONFIG)
    parts = load_engine(config, lines.append)
    try:
        assert parts.executor.started.max_num_seqs == CACHE_BYTES // (2 * STATE_BYTES) - 1 == 5
        assert parts.executor.started.cache_groups.num_state_slots == 5 + 1 + 1
        assert any("7 states, at most 5 requests at a time" in line for line in lines), lines
        assert make_model_info(parts, tokenizer_digest="").max_num_seqs == 5
    finally:
        parts.shutdown()
    small = LLM(str(folder), kv_cache_memory_bytes=CACHE_BYTES, **CONFIG)
    outputs = small.generate(PROMPTS, GREEDY, use_tqdm=False)
    small.llm_engine.shutdown()
    expected = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert [each.outputs[0].token_ids for each in outputs] == [each.outputs[0].token_ids for each in expected]


def test_drafts_change_no_token(folder: Path, llm: LLM) -> None:
    few = replace(GREEDY, allowed_token_ids=(97, 98, 99))
    params = [few, replace(few, temperature=1.0, seed=3), GREEDY, replace(GREEDY, temperature=1.0, seed=5)] * 3
    expected = [each.outputs[0].token_ids for each in llm.generate(PROMPTS, params, use_tqdm=False)]
    drafting = LLM(str(folder), kv_cache_memory_bytes=CACHE_BYTES, speculative_config=DRAFTS, **CONFIG)
    for _ in range(2):
        outputs = drafting.generate(PROMPTS, params, use_tqdm=False)
        assert [each.outputs[0].token_ids for each in outputs] == expected
    assert drafting.llm_engine._core.counters().drafts.num_accepted_tokens > 20
    drafting.llm_engine.shutdown()


def test_inputs_that_are_kept_of_drafts_count_as_memory_of_the_cache(folder: Path) -> None:
    lines: list[str] = []
    config = EngineConfig.from_options(
        model=str(folder),
        kv_cache_memory_bytes=CACHE_BYTES,
        speculative_config=SpeculativeConfig.from_mapping(DRAFTS),
        **CONFIG,
    )
    parts = load_engine(config, lines.append)
    try:
        request_bytes = STATE_BYTES + 4 * INPUT_BYTES
        assert parts.executor.started.max_num_seqs == (CACHE_BYTES - 2 * STATE_BYTES) // (2 * request_bytes) == 4
    finally:
        parts.shutdown()


def test_prompt_logprobs_are_those_of_a_prompt_without_a_hit(llm: LLM) -> None:
    plain = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0]
    (told,) = llm.generate(PROMPTS[1], replace(GREEDY, prompt_logprobs=1), use_tqdm=False)
    (again,) = llm.generate(PROMPTS[1], replace(GREEDY, prompt_logprobs=1), use_tqdm=False)
    assert told.prompt_logprobs is not None
    assert len(told.prompt_logprobs) == len(PROMPTS[1])
    assert told.prompt_logprobs == again.prompt_logprobs
    assert told.outputs[0].token_ids == plain.outputs[0].token_ids


def test_choices_continue_the_prompts_state(llm: LLM) -> None:
    params = replace(GREEDY, temperature=1.5, seed=7, n=3)
    first, second = (llm.generate(PROMPTS[1], params, use_tqdm=False)[0] for _ in range(2))
    assert [each.token_ids for each in first.outputs] == [each.token_ids for each in second.outputs]
    assert len({tuple(each.token_ids) for each in first.outputs}) == 3
    same = llm.generate(PROMPTS[1], replace(GREEDY, n=3), use_tqdm=False)[0]
    expected = llm.generate(PROMPTS[1], GREEDY, use_tqdm=False)[0]
    assert [each.token_ids for each in same.outputs] == [expected.outputs[0].token_ids] * 3


def test_a_stop_string_ends_the_output(llm: LLM) -> None:
    whole = llm.generate(PROMPTS[0], replace(GREEDY, allowed_token_ids=(97, 98, 99)), use_tqdm=False)[0].outputs[0].text
    stop = whole[5:8]
    params = replace(GREEDY, allowed_token_ids=(97, 98, 99), stop=(stop,))
    (output,) = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs
    assert output.finish_reason == "stop"
    assert output.text == whole[: whole.index(stop)]


def test_an_output_follows_its_grammar_in_a_batch(llm: LLM) -> None:
    forms = [
        StructuredOutputsParams(choice=["red", "reddish", "green"]),
        StructuredOutputsParams(regex=r"\d{3}-[a-f]{2}"),
    ]
    params = [SamplingParams(max_tokens=20, seed=1, structured_outputs=form) for form in forms]
    outputs = llm.generate([PROMPTS[0]] * 3, [*params, GREEDY], use_tqdm=False)
    chosen, matched, free = (output.outputs[0] for output in outputs)
    assert chosen.text in ("red", "reddish", "green")
    assert len(matched.text) == 6
    assert matched.text[3] == "-"
    assert free.token_ids == llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)[0].outputs[0].token_ids
