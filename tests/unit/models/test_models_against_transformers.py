"""The same folder gives the same logits in Proa and in transformers, in float32, for each architecture and option."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.config import LoadFormat
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from proa_engine.models.registry import NAMES_OF_LLAMA
from support.paged_model import CachedSequence, PagedModel
from support.renamed_models import STORED, make_renamed_model
from support.tiny_models import LATENT, VOCAB_SIZE, as_text_part, make_tiny_model

TOLERANCE = 1e-4  # logits are of the order of 3
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 128}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 1e4,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "short_factor": [1.0 + 0.1 * i for i in range(8)],
    "long_factor": [1.0 + 0.5 * i for i in range(8)],
}
TWO_ROPES = {"full_attention": YARN, "sliding_attention": {"rope_type": "default", "rope_theta": 100.0}}
GEMMA4 = {
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama tied": ("llama", {"tie_word_embeddings": True}),
    "llama biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama rope dynamic": ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}),
    "llama rope linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}}),
    "llama rope llama3": ("llama", {"rope_parameters": LLAMA3}),
    "llama rope yarn": ("llama", {"rope_parameters": YARN}),
    "llama rope yarn, own attention factor": ("llama", {"rope_parameters": YARN | {"attention_factor": 1.5}}),
    "llama, whose heads are never rotated in part": (
        "llama",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    ),
    "llama odd heads": (
        "llama",
        {"num_attention_heads": 15, "num_key_value_heads": 5, "head_dim": 10, "hidden_size": 45},
    ),
    "llama one KV head": ("llama", {"num_key_value_heads": 1}),
    "llama no sharing": ("llama", {"num_key_value_heads": 4}),
    "llama sharded files": ("llama", {"max_shard_size": "100KB"}),
    "mistral window": ("mistral", {"sliding_window": 24}),
    "mistral window 1": ("mistral", {"sliding_window": 1}),
    "mistral no window": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen2 tied, window above": (
        "qwen2",
        {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 20, "max_window_layers": 1},
    ),
    "qwen3": ("qwen3", {}),
    "seed_oss": ("seed_oss", {"attention_bias": True, "attention_out_bias": False}),
    "seed_oss without biases": ("seed_oss", {"attention_bias": False, "attention_out_bias": False}),
    "qwen3 moe": ("qwen3_moe", {}),
    "qwen3 moe, weights as they are, one layer plain": (
        "qwen3_moe",
        {"norm_topk_prob": False, "mlp_only_layers": [1], "num_experts_per_tok": 1},
    ),
    "qwen3 next": ("qwen3_next", {}),
    "qwen3 next, a plain layer": ("qwen3_next", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "qwen3.5": ("qwen3_5_text", {}),
    "qwen3.5 tied, one value head each": (
        "qwen3_5_text",
        {"tie_word_embeddings": True, "linear_num_value_heads": 2, "linear_value_head_dim": 8},
    ),
    "qwen3.5, rotation of a quarter": (
        "qwen3_5_text",
        {"head_dim": 24, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25}},
    ),
    "qwen3.5 moe": ("qwen3_5_moe_text", {}),
    "granite 4": ("granitemoehybrid", {}),
    "granite 4 without experts, with rotation and biases, one group": (
        "granitemoehybrid",
        {
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 1,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": [0.01, 0.5],
        },
    ),
    "granite 4 of attention alone": ("granitemoehybrid", {"layer_types": ["full_attention"] * 3}),
    "nemotron h": ("nemotron_h", {}),
    "nemotron h without latent values": (
        "nemotron_h",
        {"moe_latent_size": None, "use_bias": True, "use_conv_bias": False, "norm_topk_prob": False, "n_groups": 1},
    ),
    "lfm2": ("lfm2", {}),
    "lfm2, biases, four inputs, an adjusted width": (
        "lfm2",
        {
            "conv_bias": True,
            "conv_L_cache": 4,
            "block_auto_adjust_ff_dim": True,
            "block_multiple_of": 16,
            "block_ffn_dim_multiplier": 1.1,
            "tie_word_embeddings": True,
        },
    ),
    "lfm2 moe": ("lfm2_moe", {}),
    "lfm2 moe without corrections": ("lfm2_moe", {"use_expert_bias": False, "norm_topk_prob": False}),
    "glm4 moe": ("glm4_moe", {"num_hidden_layers": 3, "n_shared_experts": 2}),
    "glm4 moe, biases and norms": ("glm4_moe", {"attention_bias": True, "use_qk_norm": True, "norm_topk_prob": False}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 4}),
    "gpt-oss, reaching no limit": ("gpt_oss", {"swiglu_limit": 7.0, "rope_parameters": YARN}),
    "mixtral": ("mixtral", {"sliding_window": 24}),
    "olmoe": ("olmoe", {"norm_topk_prob": False}),
    "qwen2 moe": ("qwen2_moe", {}),
    "qwen2 moe, one layer plain": ("qwen2_moe", {"mlp_only_layers": [0], "norm_topk_prob": False}),
    "gemma 2": (
        "gemma2",
        {"num_hidden_layers": 3, "sliding_window": 24, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 2.0},
    ),
    "gemma 3": (
        "gemma3_text",
        {"num_hidden_layers": 4, "sliding_window": 24, "query_pre_attn_scalar": 20, "final_logit_softcapping": 3.0}
        | {"layer_types": ["sliding_attention", "full_attention"] * 2, "rope_parameters": TWO_ROPES},
    ),
    "deepseek v2": ("deepseek_v2", LATENT | {"topk_method": "group_limited_greedy"}),
    "deepseek v2 lite": ("deepseek_v2", LATENT | {"q_lora_rank": None, "n_group": 1, "topk_group": 1}),
    "deepseek v3": ("deepseek_v3", LATENT | {"rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 0.7}}),
    "deepseek v3, halves": ("deepseek_v3", LATENT | {"rope_interleave": False, "norm_topk_prob": False}),
    "glm 4 moe lite": ("glm4_moe_lite", LATENT | {"n_group": 1, "topk_group": 1}),
    "gemma 4": ("gemma4_text", GEMMA4),
    "gemma 4, values from keys": (
        "gemma4_text",
        GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 3.0},
    ),
    "gemma 4, inputs of layers, shared caches": (
        "gemma4_text",
        GEMMA4
        | {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCAB_SIZE}
        | {"use_double_wide_mlp": True},
    ),
    "gemma 4, experts": (
        "gemma4_text",
        GEMMA4 | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3, "moe_intermediate_size": 24},
    ),
    "glm": ("glm", {}),
    "glm 4": ("glm4", {"attention_bias": False}),
    "granite": (
        "granite",
        {
            "embedding_multiplier": 6.0,
            "attention_multiplier": 0.2,
            "residual_multiplier": 0.5,
            "logits_scaling": 4.0,
            "attention_bias": True,
        },
    ),
    "ministral 3": (
        "ministral3",
        {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 32}},
    ),
    "olmo 2": ("olmo2", {}),
    "olmo 3": (
        "olmo3",
        {
            "sliding_window": 24,
            "rope_parameters": TWO_ROPES,
        },
    ),
    "phi 3": ("phi3", {"sliding_window": 24}),
    "phi 4 mini": (
        "phi3",
        {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.75}},
    ),
    "phi 3, beyond its first context": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 64},
    ),
    "phi 3, within its first context": (
        "phi3",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 512},
    ),
    "phi 4": ("phi3", {"num_key_value_heads": 1, "tie_word_embeddings": True}),
    "smollm 3": ("smollm3", {"no_rope_layer_interval": 2}),
    "smollm 3, windows": (
        "smollm3",
        {"no_rope_layers": [0, 1], "use_sliding_window": True, "sliding_window": 20, "attention_bias": True},
    ),
    "qwen3 tied, bias, yarn": ("qwen3", {"tie_word_embeddings": True, "attention_bias": True, "rope_parameters": YARN}),
}


@pytest.mark.parametrize(("architecture", "overrides"), CASES.values(), ids=CASES.keys())
def test_logits_equal_those_of_transformers(architecture: str, overrides: dict[str, Any], tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, seed=3, **overrides)
    check_logits(folder, folder)


def check_logits(of_ours: Path, of_theirs: Path) -> None:
    """Two prompts, in chunks and batches, in two folders with the same model."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(of_theirs, attn_implementation="eager")
    ours = load(of_ours)
    tokens = torch.randint(0, VOCAB_SIZE, (2, 150), generator=torch.Generator().manual_seed(5))
    with torch.inference_mode():
        expected = theirs(tokens).logits
        batch = PagedModel(ours)
        sequences = [CachedSequence(row) for row in tokens.tolist()]
        parts: list[list[torch.Tensor]] = [[], []]
        for lengths in ((40, 100), (70, 1), (40, 49)):
            for part, hidden in zip(parts, batch.step(list(zip(sequences, lengths, strict=True))), strict=True):
                part.append(hidden)
        for part, logits in zip(parts, expected, strict=True):
            torch.testing.assert_close(ours.compute_logits(torch.cat(part)), logits, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("architecture", STORED)
def test_other_names_of_fields_and_tensors_give_the_same_logits(architecture: str, tmp_path: Path) -> None:
    check_logits(*make_renamed_model(tmp_path, architecture))


def test_chatglm_has_a_second_name(tmp_path: Path) -> None:
    folder, theirs = make_renamed_model(tmp_path, "ChatGLMForConditionalGeneration")
    edit_config(folder, architectures=["ChatGLMModel"], multi_query_group_num=2)
    check_logits(folder, theirs)


def test_baichuan_of_13b_is_refused(tmp_path: Path) -> None:
    folder, _ = make_renamed_model(tmp_path, "BaichuanForCausalLM")
    edit_config(folder, max_position_embeddings=None, model_max_length=4096)
    with pytest.raises(ValueError, match="ALiBi"):
        load(folder)


@pytest.mark.parametrize("name", NAMES_OF_LLAMA)
def test_a_further_name_of_llama_gives_its_logits(name: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, attention_bias=True)
    expected = prompt_logits(folder)
    edit_config(folder, architectures=[name], model_type="of another library", attention_bias=None, bias=True)
    assert torch.equal(prompt_logits(folder), expected)


def test_minicpm_is_granite_with_factors_that_follow_from_its_sizes(tmp_path: Path) -> None:
    factors: dict[str, Any] = {"embedding_multiplier": 12.0, "residual_multiplier": 0.7, "logits_scaling": 4.0}
    folder = make_tiny_model(tmp_path, "granite", num_hidden_layers=4, attention_multiplier=0.25, **factors)
    expected = prompt_logits(folder)
    dropped = dict.fromkeys((*factors, "attention_multiplier"))
    sizes = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 16}
    edit_config(folder, architectures=["MiniCPMForCausalLM"], model_type="minicpm", **dropped, **sizes)
    assert torch.equal(prompt_logits(folder), expected)
    edit_config(folder, sparse_config={"topk": 64})
    with pytest.raises(ValueError, match="sparse_config"):
        load(folder)


def prompt_logits(folder: Path) -> torch.Tensor:
    model = load(folder)
    return model.compute_logits(PagedModel(model).prefill(list(range(30))))


def edit_config(folder: Path, **changes: Any) -> None:
    """Set fields of config.json; None: remove them."""
    path = folder / "config.json"
    fields = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({name: value for name, value in fields.items() if value is not None}))


def test_an_own_lm_head_is_kept_though_the_configuration_ties_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, seed=3, tie_word_embeddings=True)
    path, prompt = folder / "model.safetensors", list(range(30))
    tensors = load_file(path)
    embedding = tensors["model.embed_tokens.weight"]
    logits = []
    for head in (None, embedding.clone(), embedding.flip(0).clone()):
        save_file(tensors | ({} if head is None else {"lm_head.weight": head}), path, metadata={"format": "pt"})
        assert not caplog.records
        model = load(folder)
        logits.append(model.compute_logits(PagedModel(model).prefill(prompt)))
    assert torch.equal(logits[0], logits[1])
    with torch.inference_mode():
        theirs = AutoModelForCausalLM.from_pretrained(folder)(torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(logits[2], theirs, atol=TOLERANCE, rtol=0)
    assert torch.equal(logits[2].argmax(-1), theirs.argmax(-1))
    assert "lm_head.weight differs from the embedding" in caplog.text


@pytest.mark.parametrize("names", [("model.", "model.language_model."), ("model.", "language_model.model.")])
def test_the_text_model_of_a_larger_checkpoint_is_loaded(names: tuple[str, str], tmp_path: Path) -> None:
    text = make_tiny_model(tmp_path / "text", "gemma3_text", tie_word_embeddings=True)
    whole = as_text_part(text, tmp_path / "whole", "Gemma3ForConditionalGeneration", names)
    logits = [model.compute_logits(PagedModel(model).prefill([1, 2, 3])) for model in (load(text), load(whole))]
    assert torch.equal(*logits)


def test_layers_that_predict_further_tokens_are_not_loaded(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "glm4_moe", num_nextn_predict_layers=1)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.layers.2.eh_proj.weight"] = torch.zeros(3)
    save_file(tensors, folder / "model.safetensors")
    load(folder)
    save_file(tensors | {"model.layers.3.eh_proj.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected model.layers.3.eh_proj.weight"):
        load(folder)


@pytest.mark.parametrize("architecture", sorted({architecture for architecture, _ in CASES.values()}))
def test_dummy_weights_make_a_model_that_runs(architecture: str, tmp_path: Path) -> None:
    overrides = next(overrides for name, overrides in CASES.values() if name == architecture)
    model = load(make_tiny_model(tmp_path, architecture, **overrides), "dummy")
    assert model.compute_logits(PagedModel(model).prefill([1, 2, 3])).isfinite().all()


def load(folder: Path, load_format: LoadFormat = "auto") -> CausalLM:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        load_format=load_format,
        report=lambda line: None,
    )


def test_bfloat16_runs_on_a_cpu_and_stays_near_float32(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3")
    config = read_config.from_folder(folder)
    tokens = list(range(60))
    logits = []
    for dtype in (torch.float32, torch.bfloat16):
        model = load_model(
            folder,
            config,
            dtype=dtype,
            device=torch.device("cpu"),
            parallel=ParallelContext(),
            report=lambda line: None,
        )
        hidden = PagedModel(model, dtype=dtype).prefill(tokens, 25)
        logits.append(model.compute_logits(hidden))
    assert logits[1].dtype == torch.bfloat16
    torch.testing.assert_close(logits[1].float(), logits[0], atol=0.2, rtol=0)
