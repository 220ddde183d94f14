"""Two and four ranks, as processes over gloo, give the logits of one rank, for every family; each holds its share."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.models.registry import MODULES
from support.image_models import make_image_model
from support.model_rank import Job, RankResult, run_jobs
from support.mxfp4_models import write_mxfp4
from support.quantized_models import FP4_FORMATS, FP8_FORMATS, INT8_FORMATS, INT_FORMATS, SIZES, Format, write_quantized
from support.renamed_models import STORED, make_renamed_model
from support.tiny_models import LATENT, VOCAB_SIZE, make_tiny_model

SECONDS = 400  # a loaded machine imports torch slowly
SIZES_OF_RANKS = (2, 4)
BY_EXPERT = ", by expert"
Results = dict[tuple[str, int], list[RankResult]]  # of each rank, by model and number of ranks

# Models have 4 heads and 2 KV heads unless their fields say otherwise, so each KV head is on two of four ranks.
WINDOWS = {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 24}
FIVE_HEADS = {"hidden_size": 80, "num_attention_heads": 5, "num_key_value_heads": 5}  # 3 and 2; 2, 1, 1 and 1
THREE_GROUPS = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": 3}  # 4 and 2; 2, 2, 1 and 1
GROUPS_OF_FIVE = {"hidden_size": 80, "num_attention_heads": 10, "num_key_value_heads": 2}  # 5 and 5; 3, 2, 3 and 2
TEXT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama, five heads": ("llama", FIVE_HEADS),
    "mistral": ("mistral", {}),
    "ministral 3": ("ministral3", {}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen2, three groups": ("qwen2", THREE_GROUPS),
    "qwen3": ("qwen3", {}),
    "qwen3, groups of five": ("qwen3", GROUPS_OF_FIVE),
    "qwen3 moe": ("qwen3_moe", {"num_experts": 10}),
    "qwen3 moe, odd width": ("qwen3_moe", {"moe_intermediate_size": 50}),  # 25 and 25; in four by expert
    "qwen3 next": ("qwen3_next", {}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5 moe": ("qwen3_5_moe_text", {}),
    "granite 4": ("granitemoehybrid", {}),
    "granite 4, one group": ("granitemoehybrid", {"mamba_n_groups": 1, "num_local_experts": 0}),
    "granite 4, three groups": ("granitemoehybrid", {"hidden_size": 96, "mamba_n_heads": 12, "mamba_n_groups": 3}),
    "nemotron h": ("nemotron_h", {}),
    "nemotron h, one group": ("nemotron_h", {"n_groups": 1, "moe_latent_size": None}),
    "lfm2": ("lfm2", {"conv_bias": True}),
    "lfm2 moe": ("lfm2_moe", {}),
    "qwen2 moe": ("qwen2_moe", {}),
    "gpt-oss": ("gpt_oss", {"intermediate_size": 128}),
    "mixtral": ("mixtral", {}),
    "olmoe": ("olmoe", {}),
    "glm 4.5": ("glm4_moe", {"num_hidden_layers": 3, "n_shared_experts": 2}),
    "seed-oss": ("seed_oss", {"attention_bias": True}),
    "gemma 2": ("gemma2", {"sliding_window": 24}),
    "gemma 3": ("gemma3_text", {}),
    "gemma 4": (
        "gemma4_text",
        WINDOWS
        | {
            "global_head_dim": 32,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "num_kv_shared_layers": 2,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": VOCAB_SIZE,
            "enable_moe_block": True,
            "num_experts": 8,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
    ),
    "deepseek v2": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy", "q_lora_rank": None}),
    "deepseek v3": ("deepseek_v3", LATENT),
    "glm 4.7 flash, five heads": ("glm4_moe_lite", LATENT | FIVE_HEADS | {"n_group": 1, "topk_group": 1}),
    "glm": ("glm", {}),
    "glm 4": ("glm4", {}),
    "granite": ("granite", {"residual_multiplier": 0.5, "logits_scaling": 4.0}),
    "olmo 2": ("olmo2", {}),
    "olmo 3, groups of five": ("olmo3", GROUPS_OF_FIVE),
    "phi 4": ("phi3", {}),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2}),
}
WITH_IMAGES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3", "gemma4", "mistral3")
# The text models of checkpoints with images, of audio in prompts, of MiMo and MiniCPM are those of these families.
TEXT_OF_OTHERS = {
    "MiMoForCausalLM",
    "MiniCPMForCausalLM",
    "Qwen2AudioForConditionalGeneration",
    "Qwen3ASRForConditionalGeneration",
}
RENAMED = tuple(STORED)
IN_TESTS_OF_AUDIO = {"WhisperForConditionalGeneration"}
# Sizes that every format can cut in four, with KV heads on two ranks each.
SIZES_IN_FOUR = SIZES | {"num_key_value_heads": 2, "head_dim": 128}
QUANTIZED: dict[str, Format] = {
    "fp8, blocks": FP8_FORMATS["fp8, blocks"],
    "fp8, channels": FP8_FORMATS["compressed-tensors, channels, by token"],
    "fp8, static": FP8_FORMATS["fp8, tensors, static"],
    "int8": INT8_FORMATS["int8, channels, by token"],
    "int8, static": INT8_FORMATS["int8, static, asymmetric"],
    "nvfp4": FP4_FORMATS["nvfp4"],
    "mxfp4": FP4_FORMATS["mxfp4"],
    "awq": INT_FORMATS["awq"],
    "gptq": INT_FORMATS["gptq"],
    "gptq, inputs out of order": INT_FORMATS["gptq, inputs out of order"],
    "gptq, 8 bits": INT_FORMATS["gptq, 8 bits"],
    "compressed-tensors, 4 bits": INT_FORMATS["compressed-tensors, asymmetric groups"],
}
# Formats of experts whose width four ranks can cut.
QUANTIZED_EXPERTS: dict[str, Format] = {
    "int8 experts": INT8_FORMATS["int8, channels, by token"],
    "fp8 experts, static": FP8_FORMATS["fp8, tensors, static"],
    "int4 experts": INT_FORMATS["awq"],
    "nvfp4 experts": FP4_FORMATS["nvfp4"],
}
# Mean differences of logits. Where a token has one scale, each rank has its own for its share; elsewhere only sums
# differ, and the roundings of what lies in the middle.
TOLERANCES = {"fp8, channels": 0.2, "int8": 0.1, "int8 experts": 0.1, "fp8 experts, blocks": 0.05}
EXPERTS_IN_BLOCKS = "fp8 experts, blocks"  # 256 and 256; 128 for each of four
NARROW_IN_BLOCKS = "fp8 experts, narrow"  # 128 and 128; in four by expert. The shared one has 5 blocks
EXPERTS_IN_4_BITS = "4-bit experts"
NARROW_IN_4_BITS = "4-bit experts, narrow"  # by expert
NAMES = [
    *TEXT,
    *WITH_IMAGES,
    *RENAMED,
    *QUANTIZED,
    EXPERTS_IN_BLOCKS,
    NARROW_IN_BLOCKS,
    *QUANTIZED_EXPERTS,
    EXPERTS_IN_4_BITS,
    NARROW_IN_4_BITS,
    "dummy weights",
    "dummy mixture",
]
# Divided by expert on demand.
MIXTURES = [
    *("qwen3 moe", "qwen3 next", "qwen3.5 moe", "qwen2 moe", "gpt-oss", "mixtral", "olmoe", "glm 4.5", "gemma 4"),
    *("deepseek v2", "deepseek v3", "glm 4.7 flash, five heads", "qwen3_vl_moe", "qwen3_5_moe"),
    *(EXPERTS_IN_BLOCKS, *QUANTIZED_EXPERTS, EXPERTS_IN_4_BITS, "dummy mixture"),
]


def make_folders(root: Path) -> dict[str, Path]:
    folders = {name: make_tiny_model(root / name, kind, **fields) for name, (kind, fields) in TEXT.items()}
    folders |= {name: make_image_model(root / name, name) for name in WITH_IMAGES}
    folders |= {name: make_renamed_model(root / f"of {name}", name)[0] for name in RENAMED}
    source = make_tiny_model(root / "source", "qwen3", **SIZES_IN_FOUR)
    folders |= {name: write_quantized(source, root / name, format)[0] for name, format in QUANTIZED.items()}
    experts = make_tiny_model(root / "experts", "qwen3_moe", moe_intermediate_size=512, **SIZES_IN_FOUR)
    folders[EXPERTS_IN_BLOCKS] = write_quantized(experts, root / "fp8 experts", QUANTIZED["fp8, blocks"])[0]
    widths: dict[str, Any] = {"moe_intermediate_size": 256, "shared_expert_intermediate_size": 640}
    narrow = make_tiny_model(root / "narrow experts", "qwen2_moe", **SIZES_IN_FOUR, **widths)
    folders[NARROW_IN_BLOCKS] = write_quantized(narrow, root / "narrow fp8 experts", QUANTIZED["fp8, blocks"])[0]
    folders |= {name: write_quantized(experts, root / name, each)[0] for name, each in QUANTIZED_EXPERTS.items()}
    folders[EXPERTS_IN_4_BITS] = write_mxfp4(folders["gpt-oss"], root / "4-bit experts")[0]
    narrow = make_tiny_model(root / "narrow gpt-oss", "gpt_oss", intermediate_size=96)
    folders[NARROW_IN_4_BITS] = write_mxfp4(narrow, root / "narrow 4-bit experts")[0]
    folders["dummy weights"] = folders["llama"]
    folders["dummy mixture"] = folders["qwen3 moe"]
    assert list(folders) == NAMES
    return folders


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return make_folders(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def results(
    folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[tuple[str, int], list[RankResult]]:
    """All models run in one set of processes."""
    keys = [(name, num_ranks) for name in folders for num_ranks in (1, *SIZES_OF_RANKS)]
    keys += [(name + BY_EXPERT, num_ranks) for name in MIXTURES for num_ranks in SIZES_OF_RANKS]
    jobs = [
        Job(
            folders[name.removesuffix(BY_EXPERT)],
            num_ranks,
            "dummy" if name.startswith("dummy") else "auto",
            expert_parallel=name.endswith(BY_EXPERT),
        )
        for name, num_ranks in keys
    ]
    return dict(zip(keys, run_jobs(jobs, tmp_path_factory.mktemp("ranks"), SECONDS), strict=True))


@pytest.mark.timeout(2 * SECONDS)
@pytest.mark.parametrize("num_ranks", SIZES_OF_RANKS)
@pytest.mark.parametrize("name", [*NAMES, *(name + BY_EXPERT for name in MIXTURES)])
def test_ranks_give_the_logits_of_one(name: str, num_ranks: int, results: Results) -> None:
    model = name.removesuffix(BY_EXPERT)
    [(expected, _)] = results[model, 1]
    logits = [of_rank for of_rank, _ in results[name, num_ranks]]
    assert expected.shape[0] == 100
    for of_rank in logits:
        assert torch.equal(of_rank, logits[0]), "ranks must agree to the bit, for each samples by itself"
    if model in (*TEXT, *WITH_IMAGES, *RENAMED) or model.startswith("dummy"):
        torch.testing.assert_close(logits[0], expected, atol=1e-4, rtol=0)
    else:
        assert (logits[0] - expected).abs().mean() < TOLERANCES.get(model, 0.02)


def test_all_architectures_are_tried(folders: dict[str, Path]) -> None:
    tried = {json.loads((folder / "config.json").read_text())["architectures"][0] for folder in folders.values()}
    assert tried | TEXT_OF_OTHERS | IN_TESTS_OF_AUDIO == set(MODULES)


@pytest.mark.parametrize("num_ranks", SIZES_OF_RANKS)
def test_ranks_hold_equal_shares(num_ranks: int, results: Results) -> None:
    for name in ("llama", "qwen2", "gemma 3", "phi 4"):
        [(_, whole)] = results[name, 1]
        for _, shapes in results[name, num_ranks]:
            for matrix in ("o", "down"):
                assert shapes[matrix] == (whole[matrix][0], whole[matrix][1] // num_ranks)
            for matrix in ("embedding", "lm_head"):
                assert shapes[matrix] == (-(-whole[matrix][0] // num_ranks), whole[matrix][1])
            assert shapes["gate_up"] == (whole["gate_up"][0] // num_ranks, whole["gate_up"][1])


def test_kv_heads_are_replicated_where_ranks_outnumber_them(results: Results) -> None:
    [(_, whole)] = results["llama", 1]
    assert whole["kv_heads"] == (2,)
    assert whole["qkv"][0] == (4 + 2 + 2) * 16
    for num_ranks, rows in ((2, (2 + 1 + 1) * 16), (4, (1 + 1 + 1) * 16)):
        for _, shapes in results["llama", num_ranks]:
            assert shapes["kv_heads"] == (1,)
            assert shapes["qkv"][0] == rows


def test_heads_that_ranks_do_not_divide_are_cut_unevenly(results: Results) -> None:
    for num_ranks, heads in ((2, [3, 2]), (4, [2, 1, 1, 1])):
        ranks = [shapes for _, shapes in results["llama, five heads", num_ranks]]
        assert [shapes["kv_heads"][0] for shapes in ranks] == heads
        assert [shapes["o"][1] for shapes in ranks] == [16 * each for each in heads]


def test_experts_are_divided_by_expert_on_demand_or_where_their_width_cannot_be_cut(results: Results) -> None:
    def held(name: str, num_ranks: int) -> list[tuple[int, ...]]:
        return [shapes["experts"] for _, shapes in results[name, num_ranks]]

    halves, quarters = [(0, 4), (4, 4)], [(0, 2), (2, 2), (4, 2), (6, 2)]
    assert held("qwen3 moe", 4) == [(0, 10)] * 4
    assert held("qwen3 moe" + BY_EXPERT, 2) == [(0, 5), (5, 5)]
    assert held("qwen3 moe" + BY_EXPERT, 4) == [(0, 3), (3, 3), (6, 2), (8, 2)]
    assert held("gpt-oss" + BY_EXPERT, 2) == held("int4 experts" + BY_EXPERT, 2) == halves
    assert held("int4 experts", 4) == [(0, 8)] * 4
    assert held("qwen3 moe, odd width", 2) == held(NARROW_IN_BLOCKS, 2) == held(EXPERTS_IN_4_BITS, 2) == [(0, 8)] * 2
    assert held("qwen3 moe, odd width", 4) == held(NARROW_IN_BLOCKS, 4) == quarters
    assert held(NARROW_IN_4_BITS, 2) == halves
    assert held(NARROW_IN_4_BITS, 4) == quarters


def test_a_shared_expert_is_cut_in_whole_blocks(results: Results) -> None:
    widths = [[shapes["shared"][1] for _, shapes in results[NARROW_IN_BLOCKS, num_ranks]] for num_ranks in (2, 4)]
    assert widths == [[384, 256], [256, 128, 128, 128]]
