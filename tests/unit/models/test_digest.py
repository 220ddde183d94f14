"""The digest of a model's weights: what changes it."""

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.models.digest import weights_digest
from support.tiny_models import make_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_tiny_model(tmp_path / "model", "qwen3")


def change(folder: Path, **changed: torch.Tensor) -> None:
    (path,) = folder.glob("*.safetensors")
    save_file(load_file(path) | changed, path)


def test_a_copy_elsewhere_has_the_same_digest(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    assert weights_digest(tmp_path / "copy") == weights_digest(folder)


def test_another_value_or_type_has_another_digest(folder: Path) -> None:
    (path,) = folder.glob("*.safetensors")
    name, tensor = next(iter(load_file(path).items()))
    digests = {weights_digest(folder)}
    for other in (tensor + 1, tensor.to(torch.bfloat16)):
        change(folder, **{name: other})
        digests.add(weights_digest(folder))
    assert len(digests) == 3


def test_another_configuration_has_another_digest(folder: Path) -> None:
    before = weights_digest(folder)
    config = folder / "config.json"
    config.write_text(config.read_text().replace("{", "{ ", 1))
    assert weights_digest(folder) != before
