"""A request behind a `prefill_only` one, on the same engine or another, computes a block and gives equal tokens."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.contract import EngineCoreRequest, FinishReason, KvSource, SamplingParams
from proa.image.placeholders import place_media
from proa.image.prepare import prepare_pillow
from proa_engine.builtin import builtin_model_folder
from proa_engine.core.operations import ResetPrefixCache
from support import adapters
from support.adapters import ADAPTERS, lora_modules
from support.cache_families import FAMILIES, make_cache_family
from support.engine import Engine, Result, build_core, request, run
from support.image_chats import ALIKE, image_input_of
from support.image_chats import PARAMS as GREEDY
from support.image_models import chat_tokens, make_image_model
from support.tiny_models import make_tiny_model

BLOCK_SIZE = 16
CONFIG: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_model_len": 256, "max_num_batched_tokens": 64}
TRANSFER: dict[str, Any] = {"kv_offloading_size": 0.02, "kv_transfer_address": "127.0.0.1:0"}
PROMPT = [*range(5, 155)]
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=8, ignore_eos=True)


def prefill_of(wanted: EngineCoreRequest) -> EngineCoreRequest:
    return replace(wanted, request_id=f"prefill of {wanted.request_id}", prefill_only=True)


def generate(engine: Engine, wanted: EngineCoreRequest) -> Result:
    return run(engine, [wanted])[wanted.request_id]


def generate_on_two(prefiller: Engine, decoder: Engine, wanted: EngineCoreRequest) -> Result:
    """Send the request to one engine and its prompt to another, at the same time."""
    transfer = prefiller.executor.started.kv_transfer
    assert transfer is not None
    source = KvSource(addresses=tuple(f"127.0.0.1:{port}" for port in transfer.ports), wait_ms=20_000)
    result = Result()
    decoder.core.submit(replace(wanted, kv_source=source))
    decoder.core.step()
    assert not decoder.core.has_work(), "the request does not wait for the blocks"
    prefilled = generate(prefiller, prefill_of(wanted))
    assert (prefilled.finish_reason, prefilled.token_ids) == (FinishReason.STOP, [])
    deadline = time.monotonic() + 30
    while result.finish_reason is None:
        assert time.monotonic() < deadline
        if prefiller.core.has_work():
            prefiller.core.step()
        decoder.core.wait_for_work(timeout=0.01)
        if (outputs := decoder.core.step()) is None:
            continue
        result.token_ids += outputs.plain.token_ids
        for output in outputs.outputs:
            result.token_ids += output.new_token_ids
            result.num_cached_tokens = output.num_cached_tokens or 0
            result.finish_reason = output.finish_reason
    return result


def num_computed(engine: Engine, request_id: str, num_output_tokens: int) -> int:
    """Tokens of the prompt that the engine's steps have computed."""
    total = sum(plan.num_scheduled_tokens.get(request_id, 0) for plan in engine.plans)
    return total - (num_output_tokens - 1)


@pytest.mark.parametrize("model", [*FAMILIES, "built-in"])
def test_a_request_behind_its_prefill_computes_at_most_a_block(model: str, tmp_path: Path) -> None:
    folder = builtin_model_folder() if model == "built-in" else make_cache_family(tmp_path, model)
    with build_core(folder, poison=True, **CONFIG) as engine:
        fresh = generate(engine, request("fresh", PROMPT, PARAMS))
        engine.core.operate(ResetPrefixCache())
        wanted = request("wanted", PROMPT, PARAMS)
        prefilled = generate(engine, prefill_of(wanted))
        assert (prefilled.finish_reason, prefilled.token_ids) == (FinishReason.STOP, [])
        assert generate(engine, wanted).token_ids == fresh.token_ids
        assert num_computed(engine, "wanted", len(fresh.token_ids)) == len(PROMPT) - 144


@pytest.mark.parametrize("model", ["full", "states"])
def test_two_engines_give_the_tokens_of_one(model: str, tmp_path: Path) -> None:
    folder = make_cache_family(tmp_path, model)
    settings = CONFIG | TRANSFER
    with (
        build_core(folder, role="prefill", **settings) as first,
        build_core(folder, role="decode", **settings) as second,
    ):
        result = generate_on_two(first, second, request("a", PROMPT, PARAMS))
        assert result.num_cached_tokens == 144
        assert result.token_ids == generate(first, request("b", PROMPT, PARAMS)).token_ids


def test_two_engines_apply_an_adapter(tmp_path: Path) -> None:
    make_tiny_model(tmp_path / "model", "qwen3", seed=3)
    adapters.write_adapter(tmp_path / "model", tmp_path / ADAPTERS[0].name, ADAPTERS[0], seed=1)
    settings = CONFIG | TRANSFER | {"enable_lora": True, "lora_modules": lora_modules(tmp_path, ADAPTERS[0])}
    with build_core(tmp_path / "model", **settings) as first, build_core(tmp_path / "model", **settings) as second:
        wanted = replace(request("a", PROMPT, PARAMS), lora_name=ADAPTERS[0].name)
        result = generate_on_two(first, second, wanted)
        assert result.num_cached_tokens == 144
        assert result.token_ids == generate(first, wanted).token_ids
        assert generate(first, request("b", PROMPT, PARAMS)).token_ids != result.token_ids


@pytest.mark.parametrize("model_type", ["qwen3_vl", "gemma3"])
def test_images_are_encoded_by_the_engine_that_computes_the_prompt(model_type: str, tmp_path: Path) -> None:
    folder = make_image_model(tmp_path, model_type, seed=3)
    settings: dict[str, Any] = {"max_model_len": 256, "block_size": 4} | TRANSFER
    with build_core(folder, **settings) as first, build_core(folder, **settings) as second:
        image_input = image_input_of(first)
        images = [prepare_pillow(image, image_input) for image in ALIKE.images]
        prompt = chat_tokens(folder, ALIKE.messages, ALIKE.images)
        wanted = replace(request("a", prompt, GREEDY), images=place_media(prompt, images, image_input))
        result = generate_on_two(first, second, wanted)
        assert result.num_cached_tokens == (len(wanted.prompt_token_ids) - 1) // 4 * 4
        assert result.token_ids == generate(first, wanted).token_ids
        assert not any(plan.encoder_inputs for plan in second.plans)


def test_the_rates_of_loads_and_of_prefill_are_measured() -> None:
    with build_core(builtin_model_folder(), **CONFIG, kv_offloading_size=0.02) as engine:
        assert engine.core.stats().load_bytes_per_second > 1e6
        assert engine.core.stats().prefill_tokens_per_second == 0
        generate(engine, request("a", PROMPT, PARAMS))
        assert engine.core.stats().prefill_tokens_per_second > 0
