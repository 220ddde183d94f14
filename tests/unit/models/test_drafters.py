"""Drafters: both forms of EAGLE-3 checkpoints give what the published computation gives; what does not fit the model is
refused by name; and models of every family leave the states that `transformers` has between layers."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional

from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.attention_metadata import AttentionMetadata, Taps
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.drafters.base import BlockDrafter, Entries, HiddenDrafter, NoDrafter
from proa_engine.models.drafters.load import FoundDrafter, load_drafter, read_drafter
from proa_engine.models.loader import load_model
from support.drafter_entries import assert_entries_are_stored_alone
from support.drafters import Form, write_eagle3
from support.paged_model import PagedModel, attention_metadata, nan_caches
from support.tiny_models import LATENT, MIXTURES, VOCAB_SIZE, make_tiny_model

TOLERANCE = 1e-5
CPU: dict[str, Any] = {
    "dtype": torch.float32,
    "device": torch.device("cpu"),
    "parallel": ParallelContext(),
    "report": lambda text: None,
}
DRAFT_IDS = torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(3))[:100]
CASES: dict[str, dict[str, Any]] = {
    "the model's embedding and head": {},
    "its own embedding and head": {"own_embedding": True, "own_head": True},
    "a vocabulary of its own": {"draft_ids": DRAFT_IDS},
    "norm before the residual": {"norm_before_residual": True},
    "norm behind the residual": {"norm_before_residual": False},
    "one norm before fc": {"norm_before_fc": True},
    "a norm for each tap": {"fc_norm": True},
    "entries read the normed output": {"norm_output": True},
    "one tap": {"taps": (2,)},
    "a Qwen3 layer": {"layer": {"model_type": "qwen3"}},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("target"), "llama", seed=5)


def load(target: Path, folder: Path) -> tuple[CausalLM, HiddenDrafter]:
    config = read_config.from_folder(target)
    model = load_model(target, config, **CPU)
    options = read_drafter(SpeculativeConfig(method="eagle3", model=str(folder)), folder, config)
    drafter = load_drafter(FoundDrafter(folder, options), config, model, **CPU)
    assert not isinstance(drafter, NoDrafter | BlockDrafter)
    return model, drafter


def norm(x: Tensor, weight: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * weight


def rotate(x: Tensor, positions: Tensor) -> Tensor:
    """x [T, heads, head_dim]"""
    half = x.shape[-1] // 2
    angles = positions[:, None, None] * 10_000.0 ** (-torch.arange(half) / half)
    first, second = x.split(half, dim=-1)
    return torch.cat((first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()), -1)


class Reference:
    """EAGLE-3 over one whole sequence, from a checkpoint's tensors by their names."""

    def __init__(self, folder: Path, target: Path) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.fields = self.config.get("transformer_layer_config", self.config)
        self.w = {name.removesuffix(".weight"): each for name, each in load_file(folder / "model.safetensors").items()}
        self.of_model = load_file(target / "model.safetensors")
        self.is_library = "speculators_model_type" in self.config
        self.layer = "layers.0" if self.is_library else "midlayer"

    def combine(self, states: Tensor) -> Tensor:
        if "input_norm" in self.w:
            states = norm(states, self.w["input_norm"])
        if "fc_norm.0" in self.w:
            parts = states.chunk(states.shape[1] // self.fields["hidden_size"], dim=1)
            states = torch.cat([norm(part, self.w[f"fc_norm.{number}"]) for number, part in enumerate(parts)], dim=1)
        return states @ self.w["fc"].T

    def __call__(self, read: Tensor, next_ids: Tensor) -> Tensor:
        def w(name: str) -> Tensor:
            return self.w[f"{self.layer}.{name}"]

        positions, head_dim = torch.arange(len(read)), self.fields["head_dim"]
        embedding = self.w.get("embed_tokens", self.of_model["model.embed_tokens.weight"])
        hidden = norm(read, w("hidden_norm"))
        both = torch.cat((norm(embedding[next_ids], w("input_layernorm")), hidden), dim=1)
        q, k, v = ((both @ w(f"self_attn.{each}_proj").T).unflatten(1, (-1, head_dim)) for each in "qkv")
        if f"{self.layer}.self_attn.q_norm" in self.w:
            q, k = norm(q, w("self_attn.q_norm")), norm(k, w("self_attn.k_norm"))
        q, k, v = (each.transpose(0, 1) for each in (rotate(q, positions), rotate(k, positions), v))
        attended = functional.scaled_dot_product_attention(q[None], k[None], v[None], is_causal=True, enable_gqa=True)
        x = attended[0].transpose(0, 1).flatten(1) @ w("self_attn.o_proj").T
        x = x + (hidden if self.config.get("norm_before_residual", self.is_library) else read)
        normed = norm(x, w("post_attention_layernorm"))
        gated = functional.silu(normed @ w("mlp.gate_proj").T) * (normed @ w("mlp.up_proj").T)
        x = x + gated @ w("mlp.down_proj").T
        return norm(x, self.w["norm"]) if self.config.get("norm_output") else x

    def logits(self, hidden: Tensor) -> Tensor:
        head = self.w.get("lm_head", self.of_model["lm_head.weight"])
        logits = (hidden if self.config.get("norm_output") else norm(hidden, self.w["norm"])) @ head.T
        if "d2t" not in self.w:
            return logits
        of_model = torch.full((len(hidden), VOCAB_SIZE), -torch.inf)
        for number, difference in enumerate(self.w["d2t"].tolist()):
            of_model[:, number + difference] = logits[:, number]
        return of_model


@pytest.mark.parametrize("form", ["original", "speculators"])
@pytest.mark.parametrize("case", CASES)
def test_logits_equal_those_of_the_published_computation(target: Path, tmp_path: Path, case: str, form: Form) -> None:
    folder = write_eagle3(tmp_path / "drafter", target, form, **CASES[case])
    _, drafter = load(target, folder)
    reference = Reference(folder, target)
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(21, len(drafter.taps) * 64, generator=generator)
    next_ids = torch.randint(VOCAB_SIZE, (21,), generator=generator)
    caches = nan_caches(drafter, 8, 4)  # type: ignore[arg-type]
    read = drafter.combine(states)
    torch.testing.assert_close(read, reference.combine(states), atol=TOLERANCE, rtol=TOLERANCE)
    expected = reference(read.clone(), next_ids)
    results, blocks = [], [[6, 0, 3, 7, 1, 4]]
    for start, end in ((0, 13), (13, 20), (20, 21)):  # a prompt in chunks, then one token
        metadata = attention_metadata([end - start], [end], blocks, 4)
        part = slice(start, end)
        results.append(drafter(Entries(read[part].clone(), next_ids[part], torch.arange(start, end)), caches, metadata))
    torch.testing.assert_close(torch.cat(results), expected, atol=TOLERANCE, rtol=TOLERANCE)
    logits = drafter.compute_logits(torch.cat(results))
    torch.testing.assert_close(logits, reference.logits(expected), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("form", ["original", "speculators"])
@pytest.mark.parametrize("case", CASES)
def test_entries_are_stored_without_the_rest_of_the_layer(target: Path, tmp_path: Path, case: str, form: Form) -> None:
    _, drafter = load(target, write_eagle3(tmp_path / "drafter", target, form, **CASES[case]))
    generator = torch.Generator().manual_seed(1)
    states = torch.randn(21, len(drafter.taps) * 64, generator=generator)
    next_ids = torch.randint(VOCAB_SIZE, (21,), generator=generator)
    assert_entries_are_stored_alone(drafter, drafter.combine(states), next_ids)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"taps": (0, 1, 3)}, r"reads states before the layers \[0, 1, 3\], and the model has 2 layers"),
        ({"layer": {"num_hidden_layers": 2}}, "num_hidden_layers 2 is not supported; supported: 1"),
        ({"layer": {"vocab_size": 100}}, "for a vocabulary of 100 tokens, and the model's has 259"),
        ({"layer": {"hidden_size": 32}}, "reads states of 32 values, and the model's have 64"),
        ({"layer": {"model_type": "gpt_neox"}}, "model_type gpt_neox is not supported; supported: llama, qwen3"),
        ({"layer": {"layer_types": ["sliding_attention"]}}, "layer_types sliding_attention is not supported"),
        ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state False is not supported"),
    ],
)
def test_a_drafter_that_does_not_fit_is_refused_by_name(
    target: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder = write_eagle3(tmp_path, target, **changes)
    with pytest.raises(ValueError, match=message) as error:
        load(target, folder)
    assert str(error.value).startswith(f"speculative_config model {folder}: ")


def test_missing_tensors_are_named(target: Path, tmp_path: Path) -> None:
    folder = write_eagle3(tmp_path, target, fc_norm=True)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"fc_norm": False, "norm_before_fc": True}))
    with pytest.raises(ValueError, match=r"missing input_norm.weight \[192\]; unexpected fc_norm.0.weight"):
        load(target, folder)


class TappedModel:
    """A model with taps, whose result has their states beside its own."""

    def __init__(self, model: CausalLM, layers: tuple[int, ...]) -> None:
        self.model = model
        self.layers = layers

    def __call__(
        self, inputs: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        states = torch.empty(len(inputs), len(self.layers) * 64)
        tapped = replace(metadata, taps=Taps(self.layers, states))
        hidden = self.model(inputs, positions, caches, tapped)
        return torch.cat((hidden, states), dim=1)

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return self.model.cache_layers()


@pytest.mark.parametrize(
    ("architecture", "options"),
    [
        ("llama", {}),
        ("qwen3", {}),
        ("granite", {"residual_multiplier": 0.5}),
        ("gemma2", {}),
        ("gemma3_text", {}),
        ("glm4", {"pad_token_id": 0}),
        ("olmo3", {}),
        ("gpt_oss", MIXTURES["gpt_oss"]),
        ("deepseek_v3", LATENT),
        ("qwen3_5_text", {}),
    ],
)
def test_taps_are_the_states_that_transformers_has_between_layers(
    tmp_path: Path, architecture: str, options: dict[str, Any]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, architecture, seed=2, **options)
    config = read_config.from_folder(folder)
    model, layers = load_model(folder, config, **CPU), tuple(range(len(config.layers) + 1))
    token_ids = torch.randint(256, (33,), generator=torch.Generator().manual_seed(4)).tolist()
    found = PagedModel(TappedModel(model, layers)).prefill(token_ids, chunk=20)  # type: ignore[arg-type]
    hidden, *states = found.split(64, dim=1)
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(
        torch.tensor([token_ids]), output_hidden_states=True
    )
    *between, last = (each[0] for each in expected.hidden_states)
    for state, wanted in zip(states, between, strict=False):
        torch.testing.assert_close(state, wanted, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(hidden, last, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(model.norm(states[-1]), hidden, atol=TOLERANCE, rtol=TOLERANCE)  # type: ignore[attr-defined]
