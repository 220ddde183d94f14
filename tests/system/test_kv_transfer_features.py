"""Requests of every kind continue with the blocks of another engine as with their own: adapters, images, grammars,
drafts, and after preemption."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from proa.contract import EngineCoreRequest, KvSource, SamplingParams, StructuredOutputsParams
from proa.grammar import lower
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import load_engine
from proa_engine.executor.uniproc import UniProcExecutor
from proa_engine.json_configs import SpeculativeConfig
from support.adapters import ADAPTERS, lora_modules, write_adapter
from support.engine import Engine, Result, Watched, request, run, tokens
from support.image_chats import CHATS, Case, image_input_of
from support.image_models import chat_tokens, make_image_model
from support.tiny_models import make_tiny_model

CONFIG: dict[str, Any] = {
    "device": "cpu",
    "max_model_len": 256,
    "max_num_seqs": 8,
    "block_size": 8,
    "num_gpu_blocks_override": 200,
    "kv_offloading_size": 0.02,
    "kv_transfer_address": "127.0.0.1:0",
}
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_min=1)
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.8, seed=3, max_tokens=24, ignore_eos=True)
PROMPT = [*range(5, 105)]


@contextmanager
def engine(model: Path, **config: Any) -> Iterator[Engine]:
    parts = load_engine(EngineConfig.from_options(model=str(model), **CONFIG | config), lambda line: None)
    assert isinstance(parts.executor, UniProcExecutor)
    try:
        yield Engine(parts.core, parts.executor, Watched(parts.executor, poison=False))
    finally:
        parts.shutdown()


@contextmanager
def pair(model: Path, **config: Any) -> Iterator[tuple[Engine, Engine]]:
    with engine(model, **config) as first, engine(model, **config) as second:
        yield first, second


def compute(source: Engine, requests: Sequence[EngineCoreRequest]) -> dict[str, Result]:
    """Run requests, and let the engine store their blocks."""
    results = run(source, requests)
    while source.core.has_work():
        source.core.step()
    return results


def fetch(
    target: Engine, source: Engine, requests: Sequence[EngineCoreRequest], wait_ms: int = 20_000
) -> dict[str, Result]:
    """Run requests whose blocks the source has, or does not get within `wait_ms`."""
    transfer = source.executor.started.kv_transfer
    assert transfer is not None
    kv_source = KvSource(addresses=tuple(f"127.0.0.1:{port}" for port in transfer.ports), wait_ms=wait_ms)
    return run(target, [replace(each, kv_source=kv_source) for each in requests])


def cached(results: dict[str, Result]) -> dict[str, int]:
    return {name: result.num_cached_tokens for name, result in results.items()}


def test_a_request_with_an_adapter_fetches_the_blocks_that_its_adapter_made(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", "qwen3", seed=3)
    adapter = ADAPTERS[0]
    write_adapter(model, tmp_path / adapter.name, adapter)
    requests = [replace(request(f"with {name}", PROMPT, GREEDY), lora_name=name) for name in ("", adapter.name)]
    with pair(model, enable_lora=True, lora_modules=lora_modules(tmp_path, adapter)) as (first, second):
        computed = compute(first, requests[1:])
        assert cached(fetch(second, first, requests[:1], wait_ms=500)) == {"with ": 0}
        fetched = fetch(second, first, requests[1:])
        assert cached(fetched) == {"with all": 96}
        assert tokens(fetched) == tokens(computed)


def test_images_whose_blocks_are_fetched_are_not_encoded(tmp_path: Path) -> None:
    folder = make_image_model(tmp_path, "qwen3_vl", seed=1)
    case = Case(folder, [chat_tokens(folder, chat.messages, chat.images) for chat in CHATS], [])
    with pair(folder) as (first, second):
        requests = [case.request(index, image_input_of(first)) for index in (3, 4)]
        computed = compute(first, requests)
        fetched = fetch(second, first, requests)
        assert tokens(fetched) == tokens(computed)
        assert cached(fetched) == {str(index): (len(case.prompts[index]) - 1) // 8 * 8 for index in (3, 4)}
        assert first.core.counters().images.num_encoded > 0
        assert second.core.counters().images.num_encoded == 0


@pytest.mark.parametrize("more", [{}, {"speculative_config": DRAFTS}], ids=["plain", "drafts"])
def test_grammars_and_drafts_continue_behind_fetched_blocks(more: dict[str, Any]) -> None:
    folder = builtin_model_folder()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    grammar = lower(StructuredOutputsParams(regex="(one two ){3}[0-9]{3}-[a-z]{4}"), {}).grammar
    prompt = tokenizer.encode("Count: " + "one two " * 30).ids
    requests = [
        request("constrained", prompt, replace(SAMPLED, grammar=grammar, ignore_eos=False)),
        request("plain", prompt[::-1], GREEDY),
    ]
    with pair(folder, **more) as (first, second):
        computed = compute(first, requests)
        fetched = fetch(second, first, requests)
        assert tokens(fetched) == tokens(computed)
        assert all(count == (len(prompt) - 1) // 8 * 8 for count in cached(fetched).values())
        assert (second.core.counters().drafts.num_accepted_tokens > 0) is bool(more)


def test_fetched_requests_that_are_preempted_get_the_same_tokens() -> None:
    folder = builtin_model_folder()
    params = replace(SAMPLED, max_tokens=60)
    requests = [request(f"{index}", PROMPT[index:], params) for index in range(4)]
    with engine(folder) as first, engine(folder, num_gpu_blocks_override=60) as second:
        computed = compute(first, requests)
        fetched = fetch(second, first, requests)
        assert tokens(fetched) == tokens(computed)
        assert min(cached(fetched).values()) >= 88
        assert second.core.stats().num_preemptions > 0


def test_the_blocks_of_other_weights_are_refused(tmp_path: Path) -> None:
    models = [make_tiny_model(tmp_path / str(seed), "qwen3", seed=seed) for seed in (3, 4)]
    with engine(models[0]) as first, engine(models[1]) as second:
        compute(first, [request("a", PROMPT, GREEDY)])
        assert cached(fetch(second, first, [request("a", PROMPT, GREEDY)])) == {"a": 0}
        counts = second.core.counters().cache.fetches
        assert counts is not None
        assert counts.num_failed_fetches == 1
