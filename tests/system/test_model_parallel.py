"""Two ranks, as processes over gloo, give the logits of one rank, and each holds half of the sharded weights."""

import multiprocessing
from pathlib import Path

import pytest
import torch

from proa_engine.config import LoadFormat
from proa_engine.layers.parallel import ParallelContext
from support.image_models import make_image_model
from support.model_rank import RankResult, run_model, run_rank
from support.mxfp4_models import write_mxfp4
from support.quantized_models import FP8_FORMATS, INT4_FORMATS, SIZES, write_quantized
from support.tiny_models import VOCAB_SIZE, make_tiny_model

SECONDS = 250  # a loaded machine imports torch slowly


def run_ranks(folders: list[Path], load_format: LoadFormat, world_size: int, out: Path) -> list[list[RankResult]]:
    # One process imports torch, the ranks are its children.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["support.model_rank"])
    ranks = [
        context.Process(target=run_rank, args=(rank, world_size, out / "meeting", folders, load_format, out))
        for rank in range(world_size)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
    for process in ranks:
        if process.is_alive():
            process.kill()
    assert [process.exitcode for process in ranks] == [0] * world_size
    return [torch.load(out / f"{rank}.pt") for rank in range(world_size)]


@pytest.mark.timeout(2 * SECONDS)
def test_two_ranks_give_the_logits_of_one_and_hold_half_each(tmp_path: Path) -> None:
    folders = [
        make_tiny_model(tmp_path / "llama", "llama", attention_bias=True, mlp_bias=True),
        make_tiny_model(tmp_path / "mistral", "mistral"),
        make_tiny_model(tmp_path / "qwen2", "qwen2", tie_word_embeddings=True),
        make_tiny_model(tmp_path / "qwen3", "qwen3"),
        make_tiny_model(tmp_path / "qwen3.5", "qwen3_5_text"),
        make_tiny_model(tmp_path / "gemma 3", "gemma3_text"),
        make_tiny_model(
            tmp_path / "gemma 4",
            "gemma4_text",
            num_hidden_layers=4,
            layer_types=["sliding_attention", "full_attention"] * 2,
            global_head_dim=32,
            attention_k_eq_v=True,
            num_kv_shared_layers=2,
            hidden_size_per_layer_input=8,
            vocab_size_per_layer_input=VOCAB_SIZE,
            enable_moe_block=True,
            num_experts=8,
            top_k_experts=3,
            moe_intermediate_size=24,
        ),
        make_tiny_model(tmp_path / "olmo 3", "olmo3"),
        make_tiny_model(tmp_path / "phi 4", "phi3"),
        make_image_model(tmp_path / "qwen3 vl", "qwen3_vl"),
        make_image_model(tmp_path / "gemma 3 with images", "gemma3"),
    ]
    ranks = run_ranks(folders, "auto", 2, tmp_path)
    for folder, first, second in zip(folders, *ranks, strict=True):
        logits, whole = run_model(folder, "auto", ParallelContext())
        assert torch.equal(first[0], second[0]), "ranks must agree to the bit, for each samples by itself"
        assert first[0].shape[0] == 100
        torch.testing.assert_close(first[0], logits, atol=1e-4, rtol=0)
        half_vocab = -(-first[0].shape[1] // 2)
        for _, shapes in (first, second):
            for name in ("qkv", "gate_up"):
                assert shapes[name] == (whole[name][0] // 2, whole[name][1])
            for name in ("o", "down"):
                assert shapes[name] == (whole[name][0], whole[name][1] // 2)
            assert shapes["embedding"] == shapes["lm_head"] == (half_vocab, whole["embedding"][1])
            assert shapes["kv_heads"] == (whole["kv_heads"][0] // 2,)


@pytest.mark.timeout(2 * SECONDS)
def test_two_ranks_share_experts_and_quantized_weights(tmp_path: Path) -> None:
    source = make_tiny_model(tmp_path / "source", "qwen3", **SIZES)
    formats = {
        "blocks": FP8_FORMATS["fp8, blocks"],
        "channels": FP8_FORMATS["compressed-tensors, channels, by token"],
        "static": FP8_FORMATS["fp8, tensors, static"],
        "awq": INT4_FORMATS["awq"],
        "gptq": INT4_FORMATS["gptq"],
        "gptq out of order": INT4_FORMATS["gptq, inputs out of order"],
    }
    folders = [write_quantized(source, tmp_path / name, format)[0] for name, format in formats.items()]
    folders.append(make_tiny_model(tmp_path / "experts", "qwen3_moe"))
    folders.append(make_tiny_model(tmp_path / "shared expert, projections by key head", "qwen3_next"))
    experts = make_tiny_model(tmp_path / "source of experts", "qwen3_moe", moe_intermediate_size=256, **SIZES)
    gpt_oss = make_tiny_model(tmp_path / "gpt-oss", "gpt_oss", intermediate_size=128)
    folders += [gpt_oss, write_mxfp4(gpt_oss, tmp_path / "4-bit experts")[0]]
    folders += [make_tiny_model(tmp_path / name, name) for name in ("mixtral", "olmoe", "qwen2_moe")]
    folders.append(write_quantized(experts, tmp_path / "8-bit experts", FP8_FORMATS["fp8, blocks"])[0])
    ranks = run_ranks(folders, "auto", 2, tmp_path)
    for folder, (first, _), (second, _) in zip(folders, *ranks, strict=True):
        logits, _ = run_model(folder, "auto", ParallelContext())
        assert torch.equal(first, second)
        # Where a token has one scale, each rank has its own for its half; elsewhere only sums differ, and roundings
        # of what lies in the middle.
        error = (first - logits).abs().mean()
        assert error < (0.2 if folder.parent.name == "channels" else 0.02), folder


@pytest.mark.timeout(2 * SECONDS)
def test_four_ranks_with_dummy_weights_give_the_logits_of_one(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model", num_key_value_heads=4)
    ranks = run_ranks([folder], "dummy", 4, tmp_path)
    logits, _ = run_model(folder, "dummy", ParallelContext())
    for [(of_rank, _)] in ranks:
        assert torch.equal(of_rank, ranks[0][0][0])
        torch.testing.assert_close(of_rank, logits, atol=1e-5, rtol=0)
