"""Adapters whose files are damaged or of an unknown form are refused with a sentence."""

import json
import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from proa_engine.core.lora_store import LoraInvalid, LoraNotFound
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.lora import LoraMethod, LoraProducts, LoraSegment
from proa_engine.layers.weights import Projection, Slice, Weights
from proa_engine.models.lora_weights import LoraWeights, digest, open_lora, unchanged
from proa_engine.models.weight_sources import RandomWeights
from proa_engine.sources.resolve import resolve_lora
from proa_engine.step.loras import LoraAdapters

MODULE = "layers.0.mlp.up_proj"
SEGMENT = LoraSegment(MODULE, out_features=6, in_features=4, rows=(), columns=None)
A, B = torch.ones(2, 4), torch.ones(6, 2)


def read(folder: Path, a: torch.Tensor = A, b: torch.Tensor = B, **config: Any) -> float:
    """Write an adapter, read it, and return its scale."""
    name = f"base_model.model.model.{MODULE}"
    save_file({f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "lora_alpha": 8} | config))
    with opened(folder) as checkpoint:
        matrices = checkpoint.read(SEGMENT)
    assert matrices is not None
    return matrices.scale


def products_of(*modules: str) -> LoraProducts:
    """A model's products, each of one module of the shape of `SEGMENT`."""
    products = LoraProducts(1, 16, torch.float32, torch.device("cpu"))
    source = RandomWeights(0, torch.float32, torch.device("cpu"))
    for module in modules:
        weights = Weights(source, LoraMethod(Unquantized(), products)) / "model" / module
        weights.method.load([Projection(weights, 6, 4, Slice(0, 0, 6))], None)
    return products


def opened(folder: Path) -> AbstractContextManager[LoraWeights]:
    return open_lora(folder, 16, torch.float16)


def test_the_scale_is_alpha_by_rank(tmp_path: Path) -> None:
    assert read(tmp_path) == 4.0


@pytest.mark.parametrize("alpha", [None, "8", [8], True, float("nan"), float("inf"), 10**400])
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


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf"), 1e5])
def test_values_that_are_not_finite_in_the_engines_type_are_refused(tmp_path: Path, value: float) -> None:
    for name, matrix in (("a", A.clone()), ("b", B.clone())):
        matrix[1, 1] = value
        with pytest.raises(
            LoraInvalid, match=rf"lora_{name.upper()}.weight .* are not finite numbers in torch.float16"
        ):
            read(tmp_path, **{name: matrix})


def test_a_scale_that_leaves_the_range_of_the_engines_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoraInvalid, match=r"not finite numbers in torch\.float16, as they are or times 50000"):
        read(tmp_path, b=2 * B, lora_alpha=100_000)


@pytest.mark.parametrize("content", ["[" * 100_000, '{"a":' * 100_000, "1" * 5000, "\xff"])
def test_a_configuration_that_json_cannot_read_is_refused(tmp_path: Path, content: str) -> None:
    read(tmp_path)
    (tmp_path / "adapter_config.json").write_text(content)
    with pytest.raises(LoraInvalid, match=r"is not JSON|nested too deeply|has no peft_type"), opened(tmp_path):
        pass


def test_a_deep_value_is_shortened_in_the_message(tmp_path: Path) -> None:
    value: list[Any] = []
    for _ in range(900):
        value = [value]
    with pytest.raises(LoraInvalid, match=r"adapters with bias \[\[\[\[\[\[\[...\]+ are not supported"):
        read(tmp_path, bias=value)


def test_a_huge_configuration_is_not_read(tmp_path: Path) -> None:
    read(tmp_path)
    with (tmp_path / "adapter_config.json").open("ab") as file:
        file.truncate(2**40)
    with pytest.raises(LoraInvalid, match="must not be larger than 1048576 bytes"), opened(tmp_path):
        pass


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
@pytest.mark.parametrize("kind", ["fifo", "device", "folder"])
def test_only_regular_files_are_read(tmp_path: Path, name: str, kind: str) -> None:
    read(tmp_path)
    (tmp_path / name).unlink()
    if kind == "fifo":
        os.mkfifo(tmp_path / name)
    elif kind == "device":
        (tmp_path / name).symlink_to("/dev/zero")
    else:
        (tmp_path / name).mkdir()
    with pytest.raises(LoraInvalid, match=f"{name} is not a regular file"):
        digest(tmp_path)


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


def test_a_file_without_tensors_is_refused(tmp_path: Path) -> None:
    read(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(LoraInvalid, match=r"has no matrices: .* holds no tensors, which ZeRO-3 writes"):
        LoraAdapters(products_of(MODULE)).load(1, str(tmp_path))


def test_two_tensors_for_one_matrix_are_refused(tmp_path: Path) -> None:
    read(tmp_path)
    names = [f"base_model.model.{prefix}{MODULE}.lora_A.weight" for prefix in ("", "model.")]
    save_file({names[0]: A, names[1]: A.clone()}, tmp_path / "adapter_model.safetensors")
    with pytest.raises(LoraInvalid, match=f"has lora_A of {MODULE} twice: {names[0]} and"), opened(tmp_path):
        pass


OTHERS = ("layers.0.mlp.down_proj", "layers.1.mlp.up_proj", "layers.1.self_attn.q_proj")


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        ({"target_modules": ["up_proj"]}, OTHERS[1:2]),
        ({"target_modules": ["up_proj", "down_proj", "absent", "proj"]}, OTHERS[:2]),
        ({"target_modules": ["up_proj"], "layers_to_transform": [0]}, ()),
        ({"target_modules": ["up_proj"], "layers_to_transform": 1}, OTHERS[1:2]),
        ({"target_modules": ["model.layers.1.mlp.up_proj", "mlp.up_proj"]}, OTHERS[1:2]),
        ({"target_modules": ["up_proj", "q_proj"], "exclude_modules": ["layers.1.self_attn.q_proj"]}, OTHERS[1:2]),
        ({"target_modules": "all-linear"}, OTHERS),
        ({"target_modules": "(.*)*up_proj"}, ()),  # not run
        ({"target_modules": ["up_proj"], "exclude_modules": "(.*)*down_proj"}, ()),
        ({"target_modules": 5}, ()),
        ({}, ()),
    ],
    ids=str,
)
def test_modules_that_the_configuration_names_and_the_file_lacks_are_logged(
    config: dict[str, Any], missing: tuple[str, ...], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    read(tmp_path, **config)
    LoraAdapters(products_of(MODULE, *OTHERS)).load(1, str(tmp_path))
    lines = [record.getMessage() for record in caplog.records]
    if not missing:
        assert lines == []
        return
    (line,) = lines
    assert f"has no matrices for {len(missing)} modules that its target_modules names" in line
    assert line.endswith(f": {', '.join(missing)}")


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
