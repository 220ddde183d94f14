"""DFlash and DSpark: checkpoints of both forms give what the published computation gives, and what is not supported is
refused by name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.drafters import block
from proa_engine.models.drafters.base import BlockDrafter
from proa_engine.models.drafters.load import FoundDrafter, load_drafter, read_drafter
from proa_engine.models.loader import load_model
from support.drafters import Form, write_block
from support.paged_model import attention_metadata, nan_caches
from support.tiny_models import VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-5
CPU: dict[str, Any] = {
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "parallel": ParallelContext(),
    "report": lambda text: None,
}
NUM_CONTEXT, BLOCK = 21, 4
DRAFT_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))[:100]
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 6}
CASES: dict[str, dict[str, Any]] = {
    "the model's vocabulary": {},
    "a vocabulary of its own": {"draft_ids": DRAFT_IDS},
    "a causal window and full attention": {"layer": WINDOWS},
    "causal": {"is_causal": True},
    "sampled from the last token": {"sample_from_anchor": True},
    "one tap, one layer": {"taps": (2,), "num_layers": 1},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=5)


def load(target: Path, folder: Path, method: Literal["dflash", "dspark"] = "dflash", **fields: Any) -> BlockDrafter:
    config = read_config.from_folder(target)
    model = load_model(target, config, **CPU)
    options = read_drafter(SpeculativeConfig(method=method, model=str(folder), **fields), folder, config)
    drafter = load_drafter(FoundDrafter(folder, options), config, model, **CPU)
    assert isinstance(drafter, BlockDrafter)
    return drafter


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor) -> Tensor:
    """x [T, heads, head_dim]"""
    half = x.shape[-1] // 2
    angles = torch.arange(len(x))[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = x.split(half, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Reference:
    """The layers over one context and one block, from a checkpoint's tensors by their names."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.fields = self.config.get("transformer_layer_config", self.config)
        self.w = {name.removesuffix(".weight"): each for name, each in load_file(folder / "model.safetensors").items()}
        of_model = load_file(target / "model.safetensors")
        self.embedding = self.w.get("embed_tokens", of_model["model.embed_tokens.weight"])
        self.head = self.w.get("lm_head", of_model["lm_head.weight"])

    def hidden(self, states: Tensor, token_ids: Tensor) -> Tensor:
        context, x = norm(states @ self.w["fc"].T, self.w["hidden_norm"]), self.embedding[token_ids]
        for number in range(self.fields["num_hidden_layers"]):
            x = self.layer(f"layers.{number}", number, context, x)
        return norm(x, self.w["norm"])

    def layer(self, name: str, number: int, context: Tensor, x: Tensor) -> Tensor:
        normed = norm(x, self.w[f"{name}.input_layernorm"])
        both = torch.cat((context, normed))
        q, k, v = ((both @ self.w[f"{name}.self_attn.{each}_proj"].T).unflatten(1, (-1, 16)) for each in "qkv")
        q, k = (norm(each, self.w[f"{name}.self_attn.{key}_norm"]) for key, each in (("q", q), ("k", k)))
        q, k, v = (each.transpose(0, 1) for each in (rotate(q), rotate(k), v))
        query, key = torch.arange(len(both))[:, None], torch.arange(len(both))
        visible = torch.ones(len(both), len(both), dtype=torch.bool)
        if self.fields.get("layer_types", [""] * 9)[number] == "sliding_attention":
            visible = (key <= query) & (key > query - self.fields["sliding_window"])
        elif self.config.get("is_causal"):
            visible = key <= query
        attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], visible, enable_gqa=True)
        x = x + attended[0].transpose(0, 1).flatten(1)[len(context) :] @ self.w[f"{name}.self_attn.o_proj"].T
        normed = norm(x, self.w[f"{name}.post_attention_layernorm"])
        gate, up = (normed @ self.w[f"{name}.mlp.{each}_proj"].T for each in ("gate", "up"))
        return x + (functional.silu(gate) * up) @ self.w[f"{name}.mlp.down_proj"].T

    def logits(self, hidden: Tensor, before: Tensor) -> Tensor:
        logits = hidden @ self.head.T
        if "markov_head.markov_w1" in self.w:
            logits = logits + self.w["markov_head.markov_w1"][before] @ self.w["markov_head.markov_w2"].T
        if "d2t" not in self.w:
            return logits
        of_model = torch.full((len(hidden), VOCAB_SIZE), -torch.inf)
        of_model[:, self.w["d2t"] + torch.arange(len(self.w["d2t"]))] = logits
        return of_model


@pytest.mark.parametrize("form", ["original", "speculators"])
@pytest.mark.parametrize("method", ["dflash", "dspark"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_published_computation(
    target: Path, tmp_path: Path, case: str, form: Form, method: Literal["dflash", "dspark"]
) -> None:
    """The context in chunks, and the second of two rows begins with padding. What a block has written is overwritten by
    entries."""
    folder = write_block(tmp_path / "drafter", target, form, method=method, **CASES[case])
    drafter, reference = load(target, folder, method), Reference(folder, target)
    assert drafter.taps == CASES[case].get("taps", (1, 2))
    assert drafter.samples_last == (method == "dspark" or case == "sampled from the last token")
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(NUM_CONTEXT, len(drafter.taps) * 64, generator=generator)
    last, masks = torch.tensor([7]), torch.full((BLOCK - 1,), drafter.mask_token_id)
    token_ids = torch.cat((last, masks))
    caches = nan_caches(drafter, 8, 4)  # type: ignore[arg-type]
    table, end = [[6, 0, 3, 7, 1, 4, 2]], 0
    for start, end in ((0, 13), (13, 20), (20, NUM_CONTEXT)):
        before = attention_metadata([BLOCK], [start + BLOCK], table, 4)
        before = replace(before, num_decodes=1, decode_width=BLOCK)
        drafter.draft(token_ids, torch.arange(start, start + BLOCK), caches, before)
        metadata = attention_metadata([end - start], [end], table, 4)
        drafter.observe(states[start:end], torch.arange(start, end), caches, metadata)
    metadata = replace(attention_metadata([BLOCK + 1], [end + BLOCK], table, 4), num_decodes=1, decode_width=BLOCK + 1)
    metadata.tables[0].slot_mapping[0] = -1
    padded = torch.cat((torch.tensor([0]), token_ids)), torch.cat((torch.tensor([0]), torch.arange(end, end + BLOCK)))
    hidden = drafter.draft(*padded, caches, metadata)[1:]
    expected = reference.hidden(states, token_ids)
    torch.testing.assert_close(hidden, expected, atol=TOLERANCE, rtol=TOLERANCE)
    drafted = torch.tensor([7, 3, 200, 9])
    logits = drafter.follow(drafter.compute_logits(hidden), drafted)
    torch.testing.assert_close(logits, reference.logits(expected, drafted), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("num_layers", "taps"), [(4, (2, 6, 10, 14)), (3, (2, 8, 14)), (1, (9,))])
def test_taps_of_checkpoints_that_name_none_are_spread_over_the_model(num_layers: int, taps: tuple[int, ...]) -> None:
    """As in the drafters' own code, for a model of 16 layers."""
    assert block._taps({}, num_layers, 16) == taps


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": (1, 3)}, r"reads states before the layers \[1, 3\], and the model has 2 layers"),
        ({"layer": {"vocab_size": 100}}, "for a vocabulary of 100 tokens, and the model's has 259"),
        ({"layer": {"hidden_size": 32}}, "reads states of 32 values, and the model's have 64"),
        ({"layer": {"model_type": "llama"}}, "model_type llama is not supported; supported: qwen3"),
        ({"layer": WINDOWS, "is_causal": False}, "sliding_attention is not supported without causal attention"),
        ({"block_size": 3}, "num_speculative_tokens is 3, and its blocks have at most 2 draft tokens"),
        ({"mask_token_id": 300}, "mask_token_id is 300, and the model's vocabulary has 259 tokens"),
        ({"conv_kernel_size": 2}, "conv_kernel_size 2 is not supported; supported: 0"),
        ({"selector_top_k": 16}, "selector_top_k 16 is not supported; supported: 0"),
        ({"use_swa": True}, "use_swa True is not supported; supported: False"),
        ({"method": "dspark"}, "markov_rank is 8: take method dspark for drafters with a Markov head, dflash"),
        ({"form": "speculators", "method": "dspark"}, "speculators_model_type dspark is not supported"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_block(tmp_path, target, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(target, folder)
    assert str(error.value).startswith(f"speculative_config model {folder}: ")


def test_markov_heads_of_other_types_are_refused_and_missing_fields_are_named(target: Path, tmp_path: Path) -> None:
    folder = write_block(tmp_path, target, method="dspark", markov_head_type="rnn")
    with pytest.raises(ValueError, match="markov_head_type rnn is not supported; supported: vanilla"):
        load(target, folder, "dspark")
    fields = json.loads((folder / "config.json").read_text()) | {"markov_head_type": "vanilla"}
    (folder / "config.json").write_text(json.dumps({key: fields[key] for key in fields if key != "mask_token_id"}))
    with pytest.raises(ValueError, match="mask_token_id"):
        load(target, folder, "dspark")
