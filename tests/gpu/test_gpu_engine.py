"""Whole engines on a GPU: CUDA graphs, asynchronous scheduling, drafts and splits change no token, and nothing is
compiled while requests wait. The KV cache is poisoned wherever nothing was written."""

import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from proa.contract import SamplingParams
from proa_engine.core.operations import Sleep, SleepLevel, WakeUp
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.kernels import variants
from proa_engine.kernels.attention import decode_plan
from proa_engine.step.prompt_graphs import PromptGraphs
from support.builtin_questions import greedy_questions
from support.drafters import write_block, write_eagle3
from support.engine import build_core, request, run, tokens
from support.tiny_models import ARCHITECTURES, BYTES, make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

NUM_TOKENS = 40
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=4)
SETTINGS: dict[str, dict[str, Any]] = {
    "captured, asynchronous": {},
    "captured, synchronous": {"async_scheduling": False},
    "eager, asynchronous": {"enforce_eager": True},
    "eager, synchronous": {"enforce_eager": True, "async_scheduling": False},
    "captured, drafting": {"speculative_config": DRAFTS},
    "captured, host memory": {"kv_offloading_size": 0.05, "num_gpu_blocks_override": 40, "max_model_len": 512},
    "eager, drafting": {"speculative_config": DRAFTS, "enforce_eager": True},
}


def prompts() -> list[list[int]]:
    rows = random.Random(7)
    return [rows.choices(range(BYTES), k=length) for length in (1, 5, 16, 17, 90, 300, 411, 2, 33)]


def generate(folder: Path, params: SamplingParams, **config: Any) -> dict[str, list[int]]:
    """Generate tokens for all prompts. Fails if a kernel was compiled after the engine was ready."""
    settings: dict[str, Any] = {"device": "cuda", "max_num_seqs": 20, "max_num_batched_tokens": 256}
    with build_core(folder, poison=True, block_seed=3, **settings | config) as engine:
        compiled: list[str] = []
        variants.on_compilation(compiled.append)
        results = run(engine, [request(str(i), prompt, params) for i, prompt in enumerate(prompts())])
        assert not compiled, "compiled while requests waited"
    return {name: result.token_ids for name, result in results.items()}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_tokens_are_the_same_however_steps_are_run(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, head_dim=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = generate(folder, params, device="cpu")
    for name, setting in SETTINGS.items():
        assert generate(folder, params, **setting) == expected, name


@pytest.mark.parametrize("method", ["eagle3", "dflash", "dspark"])
@pytest.mark.parametrize("taps", [(0, 1, 2), (2,)])
def test_a_drafter_changes_no_token_however_steps_are_run(taps: tuple[int, ...], method: Any, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", "qwen3", head_dim=64)
    if method == "eagle3":
        drafter = write_eagle3(tmp_path / "drafter", folder, taps=taps)
    else:
        drafter = write_block(tmp_path / "drafter", folder, method=method, taps=taps)
    drafting = SpeculativeConfig(method=method, model=str(drafter))
    for temperature in (0.0, 0.7):
        params = SamplingParams(temperature=temperature, max_tokens=NUM_TOKENS, ignore_eos=True, key=3)
        expected = generate(folder, params)
        for more in ({}, {"enforce_eager": True}, {"async_scheduling": False}):
            assert generate(folder, params, speculative_config=drafting, **more) == expected, (temperature, more)


def test_the_built_in_drafter_is_as_good_as_on_a_cpu() -> None:
    """Tokens a step of greedy requests, of which its training shows 3.9."""
    drafting = SpeculativeConfig(method="eagle3", model="builtin", num_speculative_tokens=4)
    settings: dict[str, Any] = {"device": "cuda", "max_model_len": 1024, "batch_invariant": True}
    wanted = greedy_questions()
    with build_core("builtin", **settings) as engine:
        expected = tokens(run(engine, wanted))
    with build_core("builtin", poison=True, speculative_config=drafting, **settings) as engine:
        assert tokens(run(engine, wanted)) == expected
        counters = engine.core.counters()
    assert 1 + counters.drafts.num_accepted_tokens / counters.drafts.num_drafts > 2.5


@pytest.mark.parametrize("architecture", ["qwen3", "gemma3_text", "gpt_oss", "qwen3_moe"])
def test_prompts_that_graphs_replay_beside_decodes_and_alone_change_no_token(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, head_dim=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = generate(folder, params, enforce_eager=True)
    with mock.patch.object(PromptGraphs, "replay", autospec=True, side_effect=PromptGraphs.replay) as replay:
        assert generate(folder, params) == expected
    assert {bool(call.args[1].num_decodes) for call in replay.call_args_list} == {False, True}


def test_splits_of_a_context_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", head_dim=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    split = generate(folder, params)
    monkeypatch.setattr(decode_plan, "SPLIT_MULTIPLE", 1 << 20)
    assert generate(folder, params, enforce_eager=True) == split


@pytest.mark.parametrize(
    "others", [{}, {"top_p": 0.95, "top_k": 50}, {"top_p": 0.95, "top_k": 50, "repetition_penalty": 1.1}]
)
def test_sampled_tokens_are_the_same_with_and_without_cuda_graphs(others: dict[str, Any], tmp_path: Path) -> None:
    """Steps with penalties are sampled outside the graphs, the others by a graph."""
    folder = make_tiny_model(tmp_path, "llama", head_dim=64)
    params = SamplingParams(temperature=0.9, key=77, max_tokens=NUM_TOKENS, ignore_eos=True, **others)
    expected = generate(folder, params, enforce_eager=True)
    assert generate(folder, params) == expected
    assert generate(folder, params, speculative_config=DRAFTS) == expected


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("architecture", ["qwen3", "mistral", "qwen3_5_text"])
def test_replayed_steps_accept_draft_tokens(architecture: str, batch_invariant: bool, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, head_dim=64)
    drafts = SpeculativeConfig(method="ngram", num_speculative_tokens=7)
    params = SamplingParams(temperature=0, max_tokens=80, ignore_eos=True, allowed_token_ids=(70,))
    wanted = [request(str(i), prompt, params) for i, prompt in enumerate(prompts())]
    settings = {"device": "cuda", "max_num_seqs": 20, "batch_invariant": batch_invariant}
    with build_core(folder, poison=True, block_seed=3, speculative_config=drafts, **settings) as engine:
        results = run(engine, wanted)
        counters, num_steps = engine.core.counters(), len(engine.plans)
    assert {tuple(result.token_ids) for result in results.values()} == {(70,) * 80}
    assert counters.drafts.num_accepted_tokens > 0.8 * counters.drafts.num_draft_tokens
    assert num_steps < 40


@pytest.mark.parametrize("level", [1, 2])
def test_a_sleeping_engine_frees_its_memory_and_generates_the_same_tokens_later(
    level: SleepLevel, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", head_dim=64)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    wanted = [request(str(i), prompt, params) for i, prompt in enumerate(prompts())]
    # Far more than cuBLAS's workspaces, which stay.
    with build_core(folder, device="cuda", max_num_seqs=20, kv_cache_memory_bytes=2**30) as engine:
        before, num_bytes = tokens(run(engine, wanted)), torch.cuda.memory_allocated()
        for operation in (Sleep(level), WakeUp()):
            done = engine.core.operate(operation)
            while not done.done():
                engine.core.step()
            if isinstance(operation, Sleep):
                assert torch.cuda.memory_allocated() < num_bytes / 4
        assert tokens(run(engine, wanted)) == before
