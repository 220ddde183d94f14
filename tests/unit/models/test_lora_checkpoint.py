"""Adapters whose files are damaged or of an unknown form are refused with a sentence."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from proa_engine.core.lora_store import LoraInvalid, LoraNotFound
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.lora import LoraMethod, LoraProducts, LoraSegment
from proa_engine.layers.weights import Projection, Slice, Weights
from proa_engine.models.checkpoint import RandomWeights
from proa_engine.models.loader import resolve_lora
from proa_engine.models.lora_checkpoint import open_lora, unchanged
from proa_engine.worker.lora_adapters import LoraAdapters

MODULE = "layers.0.mlp.up_proj"
SEGMENT = LoraSegment(MODULE, out_features=6, in_features=4, rows=(), columns=None)
A, B = torch.ones(2, 4), torch.ones(6, 2)


def read(folder: Path, a: torch.Tensor = A, b: torch.Tensor = B, **config: Any) -> float:
    """Write an adapter, read it, and return its scale."""
    name = f"base_model.model.model.{MODULE}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8} | config))
    with open_lora(folder, max_rank=16) as checkpoint:
        matrices = checkpoint.read(SEGMENT)
    assert matrices is not None
    return matrices.scale


def test_the_scale_is_alpha_by_rank(tmp_path: Path) -> None:
    assert read(tmp_path) == 4.0


@pytest.mark.parametrize("alpha", [None, "8", [8], True, float("nan"), float("inf")])
def test_an_alpha_that_is_not_a_number_is_refused(tmp_path: Path, alpha: object) -> None:
    with pytest.raises(LoraInvalid, match="needs a lora_alpha"):
        read(tmp_path, lora_alpha=alpha)


@pytest.mark.parametrize("a", [torch.ones(0, 4), torch.tensor(1.0)])
def test_a_matrix_without_a_rank_is_refused(tmp_path: Path, a: torch.Tensor) -> None:
    with pytest.raises(LoraInvalid, match="without a rank"):
        read(tmp_path, a=a)


def test_matrices_of_another_rank_than_the_configurations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(LoraInvalid, match="has rank 2, not 4 or 8 as configured"):
        read(tmp_path, r=4, rank_pattern={"layers.1.mlp.up_proj": 8})
    assert read(tmp_path, r=4, rank_pattern={MODULE: 2}) == read(tmp_path, r=2) == 4.0


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.float8_e4m3fn])
def test_a_matrix_of_a_quantized_type_is_refused(tmp_path: Path, dtype: torch.dtype) -> None:
    with pytest.raises(LoraInvalid, match="has the type"):
        read(tmp_path, b=B.to(dtype))


@pytest.mark.parametrize("path", ["/" + "x" * 5000, "~no-such-user/adapter", "/a\0b", "builtin:../../nothing"])
def test_a_path_that_cannot_exist_has_no_adapter(path: str) -> None:
    with pytest.raises(LoraNotFound):
        resolve_lora(path)


def test_an_adapter_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    read(tmp_path)
    with unchanged(tmp_path):
        pass
    with pytest.raises(LoraInvalid, match="changed while it was read"), unchanged(tmp_path):
        read(tmp_path, b=torch.ones(6, 3), a=torch.ones(3, 4))


TOWERS = ["model.visual.blocks.0.attn.proj", "vision_tower.vision_model.encoder.layers.0.mlp.up_proj"]


@pytest.mark.parametrize("module", [*TOWERS, "model.vision_tower.encoder.layers.0.mlp.up_proj"])
def test_matrices_for_an_image_encoder_are_refused_and_do_not_pass_for_the_decoders(
    tmp_path: Path, module: str
) -> None:
    save_file(
        {f"base_model.model.{module}.lora_{name}.weight": matrix for name, matrix in (("A", A), ("B", B))},
        tmp_path / "adapter_model.safetensors",
    )
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8}))
    products = LoraProducts(1, 16, torch.float32, torch.device("cpu"))
    products.segments.append((SEGMENT,))
    with pytest.raises(LoraInvalid, match=f"has matrices for {module}, to which this model cannot apply adapters"):
        LoraAdapters(products).load(1, str(tmp_path))


@pytest.mark.parametrize("module", TOWERS)
def test_an_image_encoders_layers_get_no_adapters(module: str) -> None:
    products = LoraProducts(1, 16, torch.float32, torch.device("cpu"))
    weights = Weights(RandomWeights(0, torch.float32, torch.device("cpu")), LoraMethod(Unquantized(), products))
    for prefix, count in ((module, 0), (f"model.language_model.{MODULE}", 1)):
        projection = Projection(weights / prefix, 6, 4, Slice(0, 0, 6))
        assert projection.weights.method.load([projection], None).product(A).shape == (2, 6)
        assert len(products.adapters) == count
