"""Pipeline stages with images, pooled requests, adapters, grammars and a host tier give the results of one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from proa.contract import PoolingParams, PoolingTask
from proa_engine import LLM, LoRARequest, SamplingParams, StructuredOutputsParams
from proa_engine.builtin import builtin_adapter_folder
from support.cache_families import assert_equal
from support.engine import Engine, Result, build_core, pooled, request, run
from support.image_chats import make_case
from support.image_models import make_image_model
from support.pooling_models import make_embedding_model
from support.tiny_models import BYTES, make_tiny_model

PROMPTS = [[(index * 37 + place * 5) % BYTES for place in range(1 + 9 * index)] for index in range(10)]


@pytest.mark.parametrize(("family", "tensor_parallel_size"), [("qwen3_vl", 2), ("gemma3", 1)])
def test_tokens_behind_images_equal_those_of_transformers(
    family: str, tensor_parallel_size: int, tmp_path: Path
) -> None:
    layers = {"num_hidden_layers": 4} if family == "qwen3_vl" else {}
    case = make_case(make_image_model(tmp_path / "model", family, seed=1, **layers))
    config: dict[str, Any] = {"max_model_len": 140, "block_size": 4, "tensor_parallel_size": tensor_parallel_size}
    with build_core(case.folder, pipeline_parallel_size=2, **config) as engine:
        case.check(case.generate(engine))


def test_pooled_values_equal_those_of_one_process(tmp_path: Path) -> None:
    tasks = [
        PoolingParams(task=PoolingTask.EMBED),
        PoolingParams(task=PoolingTask.TOKEN_EMBED),
        PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(1, 200)),
    ]
    wanted = [
        pooled(f"{params.task.name} {number}", prompt, params)
        for number, prompt in enumerate(PROMPTS)
        for params in tasks
    ]
    folder = make_embedding_model(
        tmp_path, "mean_tokens", dense=(40,), normalize=True, architecture="qwen3", max_position_embeddings=128
    )
    config: dict[str, Any] = {"max_num_batched_tokens": 64, "block_size": 8}
    with build_core(folder, **config) as engine:
        expected = run(engine, wanted)
    with build_core(folder, pipeline_parallel_size=2, **config) as engine:
        actual = run(engine, wanted)
    for name, result in expected.items():
        torch.testing.assert_close(actual[name].values, result.values, rtol=1e-4, atol=1e-4)


def test_a_pressed_cache_with_a_host_gives_the_tokens_of_one_process(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", seed=3)
    greedy = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=0)

    def rounds(engine: Engine) -> list[Result]:
        """Each prompt three times, in turn, so that the device has evicted it meanwhile."""
        results: list[Result] = []
        for number in range(18):
            prompt = [(number % 6 * 31 + place * 7) % BYTES for place in range(130)]
            results += run(engine, [request(str(number), prompt, greedy)]).values()
        return results

    config: dict[str, Any] = {"max_model_len": 256, "max_num_batched_tokens": 48}
    with build_core(folder, **config) as engine:
        expected = rounds(engine)
    small: dict[str, Any] = {"num_gpu_blocks_override": 20, "kv_offloading_size": 0.02}
    with build_core(folder, pipeline_parallel_size=2, **config, **small) as engine:
        ours = rounds(engine)
        host = engine.core.counters().cache.host
    assert_equal(ours, expected)
    assert host is not None
    assert host.num_loaded_tokens > 500


def test_grammars_and_adapters_give_the_texts_of_one_process() -> None:
    schema = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}}, "required": ["name"]}
    forms: list[dict[str, Any]] = [{"json": schema}, {"regex": "[0-9]{3}-[a-z]{4}"}, {"choice": ["red", "green"]}]
    grammars = [StructuredOutputsParams(**form) for form in forms]
    params = [
        SamplingParams(seed=seed, max_tokens=24, structured_outputs=grammar)
        for seed, grammar in enumerate([*grammars, None] * 3)
    ]
    adapters = [LoRARequest(name, 1, str(builtin_adapter_folder(name))) for name in ("sailor", "butler")]
    loras = [*adapters, None] * 4
    messages = [[{"role": "user", "content": "Hello, how are you?"}]] * len(params)
    texts = []
    for sizes in ({}, {"pipeline_parallel_size": 2, "tensor_parallel_size": 2}):
        config: dict[str, Any] = {"enable_lora": True, "kv_cache_memory_bytes": 2**24, "dtype": "float32", **sizes}
        llm = LLM("builtin", **config)
        outputs = llm.chat(messages, params, use_tqdm=False, lora_request=loras)
        texts.append([output.outputs[0].text for output in outputs])
        llm.llm_engine.shutdown()
    assert texts[1] == texts[0]
