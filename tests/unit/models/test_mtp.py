"""MTP: a checkpoint's layer for further tokens gives what `transformers`' layer of that family gives."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.drafters.base import BlockDrafter, Entries, HiddenDrafter, NoDrafter
from proa_engine.models.drafters.load import FoundDrafter, load_drafter, read_drafter
from proa_engine.models.loader import load_model
from support.drafter_entries import assert_entries_are_stored_alone
from support.mtp_models import FAMILIES, make_library_mtp, make_mtp_model, parts_of
from support.paged_model import attention_metadata, nan_caches
from support.tiny_models import RECURRENT, VOCAB_SIZE, make_tiny_model

CPU: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "parallel": ParallelContext()}
MTP = SpeculativeConfig(method="mtp")


def load(folder: Path, drafter_folder: Path | None = None) -> HiddenDrafter:
    """The drafter of the model in `folder`: its own layer, or that in a folder of its own."""
    config = read_config.from_folder(folder)
    model = load_model(folder, config, **CPU, report=lambda text: None)
    speculative = replace(MTP, model=str(drafter_folder)) if drafter_folder else MTP
    found = FoundDrafter(drafter_folder or folder, read_drafter(speculative, drafter_folder or folder, config))
    drafter = load_drafter(found, config, model, **CPU, report=lambda text: None)
    assert not isinstance(drafter, NoDrafter | BlockDrafter)
    return drafter


def last_layer(whole: Path) -> Callable[[Tensor], Tensor]:
    """The last layer of a model of `transformers`, without the norm behind it."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(whole, dtype=torch.float32).model
    model.layers = nn.ModuleList([model.layers[-1]])
    model.config.num_hidden_layers = 1
    if getattr(model.config, "layer_types", None):
        model.config.layer_types = model.config.layer_types[-1:]
    model.norm = nn.Identity()

    def compute(x: Tensor) -> Tensor:
        output: Tensor = model(inputs_embeds=x[None], use_cache=False).last_hidden_state[0]
        return output

    return compute


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_entries_and_logits_equal_those_of_transformers_layer(tmp_path: Path, family: str) -> None:
    folder, whole = make_mtp_model(tmp_path, family)
    drafter, layer = load(folder), last_layer(whole)
    weights = {name.removesuffix(".weight"): each for name, each in load_file(folder / "model.safetensors").items()}
    is_qwen = family in RECURRENT
    of_embedding, of_hidden, projection, final = (weights[name] for name in parts_of(family)[1])
    eps = read_config.from_folder(folder).decoder.norm.eps

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (weight + is_qwen)

    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(19, 64, generator=generator)
    next_ids = torch.randint(VOCAB_SIZE, (19,), generator=generator)
    embedded = weights["model.embed_tokens"][next_ids]
    if not is_qwen:
        embedded[0] = 0
    parts = norm(embedded, of_embedding), norm(hidden, of_hidden)
    y = layer(torch.cat(parts[::-1] if family == "mimo" else parts, dim=1) @ projection.T)
    expected = y if family.startswith("glm") else norm(y, final)
    caches, blocks = nan_caches(drafter, 6, 4), [[5, 0, 3, 1, 2]]  # type: ignore[arg-type]
    found = []
    for start, end in ((0, 11), (11, 18), (18, 19)):
        metadata = attention_metadata([end - start], [end], blocks, 4)
        part = slice(start, end)
        found.append(
            drafter(Entries(drafter.combine(hidden[part]), next_ids[part], torch.arange(start, end)), caches, metadata)
        )
    torch.testing.assert_close(torch.cat(found), expected, atol=1e-5, rtol=1e-5)
    logits = drafter.compute_logits(torch.cat(found))
    torch.testing.assert_close(logits, norm(y, final) @ weights["lm_head"].T, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", FAMILIES)
@torch.inference_mode()
def test_entries_are_stored_without_the_rest_of_the_layer(tmp_path: Path, family: str) -> None:
    drafter = load(make_mtp_model(tmp_path, family)[0])
    generator = torch.Generator().manual_seed(1)
    hidden = torch.randn(19, 64, generator=generator)
    next_ids = torch.randint(VOCAB_SIZE, (19,), generator=generator)
    assert_entries_are_stored_alone(drafter, drafter.combine(hidden), next_ids)


@pytest.mark.parametrize("family", RECURRENT)
@torch.inference_mode()
def test_a_layer_that_the_library_stores_alone_gives_what_it_gives_in_the_models_checkpoint(
    tmp_path: Path, family: str
) -> None:
    folder, _ = make_mtp_model(tmp_path, family)
    hidden = torch.randn(19, 64, generator=torch.Generator().manual_seed(1))
    found = []
    for drafter in (load(folder), load(folder, make_library_mtp(folder, tmp_path / "drafter"))):
        caches = nan_caches(drafter, 6, 4)  # type: ignore[arg-type]
        metadata = attention_metadata([19], [19], [[5, 0, 3, 1, 2]], 4)
        found.append(drafter(Entries(drafter.combine(hidden), torch.arange(19), torch.arange(19)), caches, metadata))
    assert torch.equal(*found)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"speculators_model_type": "dflash"}, "speculators_model_type dflash is not supported"),
        ({"num_nextn_predict_layers": 2}, "num_nextn_predict_layers 2 is not supported"),
        ({"transformer_layer_config": {"hidden_size": 64, "vocab_size": 7}}, "it is for a vocabulary of 7 tokens"),
    ],
)
def test_layers_of_the_library_that_do_not_fit_are_refused(
    tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    folder, _ = make_mtp_model(tmp_path, "qwen3_next")
    drafter = make_library_mtp(folder, tmp_path / "drafter", **changes)
    with pytest.raises(ValueError, match=message):
        load(folder, drafter)


def test_a_layer_of_the_library_for_another_family_is_refused(tmp_path: Path) -> None:
    drafter = make_library_mtp(make_mtp_model(tmp_path, "qwen3_next")[0], tmp_path / "drafter")
    llama = make_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(ValueError, match="speculators_model_type mtp is not supported for LlamaForCausalLM"):
        load(llama, drafter)


def test_checkpoints_and_families_without_such_a_layer_are_refused(tmp_path: Path) -> None:
    without = make_tiny_model(tmp_path / "without", "glm4_moe")
    with pytest.raises(ValueError, match=r"needs a layer for further tokens, and .* has no model.layers.2.enorm"):
        read_drafter(MTP, without, read_config.from_folder(without))
    llama = make_tiny_model(tmp_path / "llama", "llama")
    with pytest.raises(ValueError, match="method mtp is not supported for LlamaForCausalLM; supported: DeepseekV3"):
        read_drafter(MTP, llama, read_config.from_folder(llama))
