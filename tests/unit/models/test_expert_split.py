"""How ranks divide experts: by width where the format of the weights can be cut, otherwise by expert."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from proa_engine.config import EngineConfig
from proa_engine.layers.expert_split import ExpertSizes, expert_range, split_experts
from proa_engine.memory.auto_config import resolve_model_config
from proa_engine.memory.kv_cache import num_parameters, weight_bytes
from proa_engine.models import read_config
from proa_engine.models.config import ModelConfig, make_batch_invariant, make_expert_parallel
from proa_engine.option_groups import Parallel
from proa_engine.sources.resolve import resolve_model

QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "num_experts": 10,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 768,
    "intermediate_size": 512,
}
GEMMA4: dict[str, Any] = {
    **QWEN3,
    "architectures": ["Gemma4ForCausalLM"],
    "enable_moe_block": True,
    "top_k_experts": 2,
    "head_dim": 32,
    "global_head_dim": 32,
}
IN_BLOCKS = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
GPT_OSS: dict[str, Any] = {
    **QWEN3,
    "architectures": ["GptOssForCausalLM"],
    "num_local_experts": 10,
    "intermediate_size": 2880,
    "quantization_config": {"quant_method": "mxfp4"},
}


def config(fields: dict[str, Any]) -> ModelConfig:
    return read_config.from_dicts(fields, {})


@pytest.mark.parametrize(
    ("model", "num_experts", "inner_size", "unit", "by_expert"),
    [
        ("Qwen3-30B-A3B", 128, 768, 1, {2: False, 4: False, 8: False}),
        ("Qwen3-30B-A3B-FP8", 128, 768, 128, {2: False, 4: True, 8: True}),
        ("Qwen3-Coder-480B-A35B-FP8", 160, 2560, 128, {2: False, 4: False, 8: True}),
        ("DeepSeek-V3", 256, 2048, 128, {2: False, 4: False, 8: False}),
        ("gpt-oss", 32, 2880, 32, {2: False, 4: True, 8: True}),
        ("a width of 100", 16, 100, 1, {2: False, 4: False, 8: True}),
    ],
)
def test_experts_are_divided_by_width_where_it_can_be_cut(
    model: str, num_experts: int, inner_size: int, unit: int, by_expert: dict[int, bool]
) -> None:
    sizes = ExpertSizes(num_experts, inner_size)
    splits = [split_experts(sizes, num_ranks, unit, wanted=False) for num_ranks in by_expert]
    assert {split.num_ranks: split.by_expert for split in splits} == by_expert, model
    assert all(split_experts(sizes, num_ranks, unit, wanted=True).by_expert for num_ranks in by_expert)


def test_the_line_of_the_log_says_how_and_why() -> None:
    sizes = ExpertSizes(128, 768)
    lines = [str(split_experts(sizes, 4, 128, wanted=False)), str(split_experts(sizes, 4, 64, wanted=False))]
    assert lines == [
        "experts: 4 ranks divide 128 experts of width 768 by expert: the format of the weights cannot cut a width of "
        "192 for each rank, no multiple of 128",
        "experts: 4 ranks divide 128 experts of width 768 by width: the width can be cut",
    ]
    assert str(split_experts(sizes, 2, 1, wanted=True)).endswith("by expert: enable_expert_parallel is set")
    assert str(split_experts(sizes, 5, 1, wanted=False)).endswith("by expert: the width cannot be divided by 5")
    assert str(split_experts(sizes, 1, 1, wanted=True)) == "experts: one rank holds all 128 experts of width 768"


@pytest.mark.parametrize(("num_experts", "num_ranks"), [(8, 1), (8, 2), (10, 4), (7, 7), (160, 3)])
def test_ranges_follow_each_other_and_the_first_are_the_largest(num_experts: int, num_ranks: int) -> None:
    ranges = [expert_range(num_experts, rank, num_ranks) for rank in range(num_ranks)]
    assert [number for each in ranges for number in each.numbers] == list(range(num_experts))
    sizes = [each.size for each in ranges]
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1


def test_fewer_experts_than_ranks_are_refused_unless_their_width_is_divided() -> None:
    sizes = ExpertSizes(4, 768)
    assert not split_experts(sizes, 8, 1, wanted=False).by_expert
    with pytest.raises(ValueError, match=r"4 experts cannot be divided among tensor_parallel_size 8 by expert"):
        split_experts(sizes, 8, 128, wanted=False)
    with pytest.raises(ValueError, match=r"by expert \(enable_expert_parallel is set\)"):
        split_experts(sizes, 8, 1, wanted=True)


def test_a_model_chooses_by_its_format() -> None:
    def by_expert(fields: dict[str, Any], num_ranks: int) -> bool:
        split = config(fields).expert_split(num_ranks)
        assert split is not None
        return split.by_expert

    assert [by_expert(QWEN3, n) for n in (1, 2, 4)] == [False, False, False]
    assert [by_expert(QWEN3 | IN_BLOCKS, n) for n in (1, 2, 4)] == [False, False, True]
    assert [by_expert(GPT_OSS, n) for n in (1, 2, 4)] == [False, False, True]
    excluded = {**GPT_OSS, "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}}
    assert by_expert(excluded, 4)


def test_only_a_mixture_can_be_divided_by_expert_on_demand() -> None:
    for fields in (QWEN3, GEMMA4):
        split = make_expert_parallel(config(fields)).expert_split(2)
        assert split is not None
        assert split.by_expert
    dense = config({**QWEN3, "architectures": ["Qwen3ForCausalLM"]})
    assert dense.expert_split(3) is None
    with pytest.raises(ValueError, match="enable_expert_parallel needs a mixture of experts, which Qwen3ForCausalLM"):
        make_expert_parallel(dense)
    adapted = replace(config(QWEN3), architecture="Ernie4_5_MoeForCausalLM", is_adapted=True)
    with pytest.raises(ValueError, match=r"enable_expert_parallel is not supported: .* is run by transformers"):
        make_expert_parallel(adapted)


def test_the_option_is_refused_at_the_start_for_a_model_without_experts() -> None:
    config = EngineConfig(model="builtin", parallel=Parallel(enable_expert_parallel=True))
    with pytest.raises(ValueError, match="enable_expert_parallel needs a mixture of experts"):
        resolve_model_config(config, resolve_model("builtin"), torch.device("cpu"))


@pytest.mark.parametrize("fields", [QWEN3, GEMMA4])
def test_no_mixture_is_batch_invariant_on_a_gpu(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="mixture of experts"):
        make_batch_invariant(config(fields), 1)


@pytest.mark.parametrize("fields", [QWEN3, GEMMA4])
def test_the_estimate_of_memory_is_that_of_the_rank_with_the_most_experts(fields: dict[str, Any]) -> None:
    model = config(fields)
    by_expert = make_expert_parallel(model)
    whole, routed = num_parameters(model), 2 * 3 * 256 * 768 * 10
    assert weight_bytes(model, 2, 1) == weight_bytes(by_expert, 2, 1) == 2 * whole
    assert weight_bytes(by_expert, 2, 2) == weight_bytes(model, 2, 2)
    assert weight_bytes(model, 2, 4) == 2 * (whole // 4)
    assert weight_bytes(by_expert, 2, 4) == 2 * ((whole - routed) // 4 + routed * 3 // 10)  # 3, 3, 2 and 2 experts
