"""Weights that do not fit are named; dummy weights do not depend on the ranks; names resolve to folders."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.real_shapes import SHAPES
from proa_engine.builtin import builtin_adapter_folder, builtin_model_folder
from proa_engine.config import LoadFormat
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Slice, Weights
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from proa_engine.models.registry import model_class
from proa_engine.models.weight_sources import RandomWeights
from proa_engine.sources.resolve import resolve_lora, resolve_model
from support.paged_model import PagedModel
from support.tiny_models import ARCHITECTURES, make_tiny_model

CPU = torch.device("cpu")


def load(
    folder: Path, *, load_format: LoadFormat = "auto", seed: int = 0, parallel: ParallelContext | None = None
) -> tuple[CausalLM, list[str]]:
    lines: list[str] = []
    model = load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=CPU,
        parallel=parallel or ParallelContext(),
        load_format=load_format,
        seed=seed,
        report=lines.append,
    )
    return model, lines


def edit_weights(folder: Path, *, drop: tuple[str, ...] = (), add: dict[str, torch.Tensor] | None = None) -> None:
    path = folder / "model.safetensors"
    tensors = {name: tensor.clone() for name, tensor in load_file(path).items() if name not in drop}
    save_file(tensors | (add or {}), path)


def test_progress_is_reported(tmp_path: Path) -> None:
    _, lines = load(make_tiny_model(tmp_path))
    assert re.match(r"loading 0\.\d+ GB of weights from 1 file of ", lines[0])
    assert lines[-1].startswith("weights loaded in ")


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_parameters_are_all_that_the_checkpoint_holds(architecture: str, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    # A small weight is held twice, see `OneRow`.
    assert stored <= sum(tensor.numel() for tensor in load(folder)[0].parameters()) < 3 * stored


def test_missing_misshapen_and_unexpected_weights_are_all_named(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    edit_weights(
        folder,
        drop=("model.norm.weight", "model.layers.1.mlp.up_proj.weight"),
        add={"model.layers.0.self_attn.q_proj.weight": torch.zeros(3, 64), "model.extra.weight": torch.zeros(1)},
    )
    with pytest.raises(ValueError, match="do not fit the model") as error:
        load(folder)
    for words in (
        "missing model.norm.weight [64]",
        "missing model.layers.1.mlp.up_proj.weight [96, 64]",
        "model.layers.0.self_attn.q_proj.weight has shape [3, 64], not [64, 64]",
        "unexpected model.extra.weight",
    ):
        assert words in str(error.value)


def test_redundant_tensors_are_no_fault(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, tie_word_embeddings=True)
    embedding = load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    edit_weights(
        folder,
        add={"lm_head.weight": embedding.clone(), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)},
    )
    load(folder)


def test_a_folder_without_weights_or_with_a_torn_file_says_so(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, max_shard_size="100KB")
    shard = sorted(folder.glob("model-*.safetensors"))[0]
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(ValueError, match="is not a readable safetensors file"):
        load(folder)
    shard.unlink()
    with pytest.raises(ValueError, match=f"files that its index names: {shard.name}"):
        load(folder)
    (folder / "model.safetensors.index.json").unlink()
    for path in folder.glob("*.safetensors"):
        path.unlink()
    with pytest.raises(ValueError, match=r"holds no \*\.safetensors weights"):
        load(folder)


def test_dummy_weights_follow_their_seed(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path)
    (folder / "model.safetensors").unlink()  # not needed

    def hidden(seed: int) -> torch.Tensor:
        model, _ = load(folder, load_format="dummy", seed=seed)
        return PagedModel(model).prefill([1, 2, 3])

    assert torch.equal(hidden(0), hidden(0))
    assert not torch.equal(hidden(0), hidden(1))


def test_dummy_weights_of_a_part_are_a_part_of_the_whole() -> None:
    weights = RandomWeights(0, torch.float32, CPU)
    whole = weights.take("a", (8, 6))
    assert torch.equal(weights.take("a", (8, 6), Slice(0, 4, 4)), whole[4:])
    assert torch.equal(weights.take("a", (8, 6), Slice(1, 0, 3)), whole[:, :3])
    assert not torch.equal(weights.take("b", (8, 6)), whole)


@pytest.mark.parametrize(
    ("overrides", "world_size", "words"),
    [
        ({}, 8, r"attention heads \(4\) are fewer than tensor_parallel_size \(8\), which can be at most 4"),
        (
            {"intermediate_size": 97},
            2,
            r"inner width of .*\.mlp \(97\) cannot be divided among tensor_parallel_size 2, neither equally nor in mul",
        ),
    ],
)
def test_sizes_that_cannot_be_shared_out_are_refused(
    overrides: dict[str, Any], world_size: int, words: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, **overrides)
    with pytest.raises(ValueError, match=words):
        load(folder, parallel=ParallelContext(rank=0, world_size=world_size))


def test_names_resolve_to_folders(tmp_path: Path) -> None:
    assert resolve_model("builtin") == builtin_model_folder()
    assert resolve_model(str(tmp_path)) == tmp_path
    with pytest.raises(ValueError, match="model folder /nowhere/at/all does not exist"):
        resolve_model("/nowhere/at/all")
    with pytest.raises(ValueError, match="neither a folder nor a hub id"):
        resolve_model("not a model!")


def test_names_of_adapters_resolve_to_folders(tmp_path: Path) -> None:
    assert resolve_lora("builtin:sailor") == builtin_adapter_folder("sailor")
    assert resolve_lora(str(tmp_path)) == tmp_path
    for path in ("/nowhere/at/all", "builtin:nobody", "nowhere"):
        with pytest.raises(LoraNotFound, match=f"there is no adapter at {path}"):
            resolve_lora(path)


def test_a_hub_id_without_a_network_says_what_to_do(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ValueError, match="is not a folder here and could not be downloaded from the hub"):
        resolve_model("proa-tests/no-such-model")


@pytest.mark.parametrize(("name", "gib"), [("gpt-oss-20b", 13.0), ("gpt-oss-120b", 62.1)])
def test_experts_of_gpt_oss_stay_in_4_bits(name: str, gib: float) -> None:
    """A checkpoint has 2 % less: here inputs are padded to blocks of 128."""
    assert sum(tensor.nbytes for tensor in meta_tensors(name)) / 2**30 == pytest.approx(gib, abs=0.1)


@pytest.mark.parametrize(("name", "billions"), [("LFM2-8B-A1B", 8.3), ("Nemotron-3-Nano", 31.6)])
def test_real_sizes_have_the_published_number_of_parameters(name: str, billions: float) -> None:
    assert sum(tensor.numel() for tensor in meta_tensors(name)) / 1e9 == pytest.approx(billions, abs=0.06)


def meta_tensors(name: str) -> list[torch.Tensor]:
    """The weights of a model of `SHAPES`, without memory."""
    config = read_config.from_dicts(SHAPES[name], {})
    source = RandomWeights(0, config.torch_dtype, torch.device("meta"))
    model = model_class(config.architecture)(config, Weights(source, config.linear_method), ParallelContext())
    return list(model.parameters())
