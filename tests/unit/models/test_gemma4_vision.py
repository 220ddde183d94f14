"""Gemma 4's images: the encoder gives the rows of transformers, and what it is made of comes from the folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoModelForImageTextToText
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

from proa.contract import ImageInput
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import ImageReader
from proa_engine.models.loader import load_model
from support.image_models import make_image_model
from support.tiny_models import VOCAB_SIZE

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Its products are clipped, and its averages standardized."""
    return make_image_model(tmp_path_factory.mktemp("gemma4"), "gemma4", seed=4)


def load(folder: Path) -> Any:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def changed(folder: Path, target: Path, file: str, change: Callable[[Fields], object]) -> Path:
    """A copy of `folder` with other fields in a file."""
    shutil.copytree(folder, target)
    fields: Fields = json.loads((target / file).read_text())
    change(fields)
    (target / file).write_text(json.dumps(fields))
    return target


def without_limits(folder: Path, target: Path) -> Path:
    def apply(fields: Fields) -> None:
        fields["vision_config"].update(use_clipped_linears=False, standardize=False)

    copy = changed(folder, target, "config.json", apply)
    tensors = load_file(copy / "model.safetensors")
    kept = {
        name: each for name, each in tensors.items() if not name.endswith(("_min", "_max", "std_bias", "std_scale"))
    }
    save_file(kept, copy / "model.safetensors", {"format": "pt"})
    return copy


@torch.inference_mode()
@pytest.mark.parametrize("is_plain", [False, True])
def test_the_encoder_gives_the_rows_of_transformers(is_plain: bool, folder: Path, tmp_path: Path) -> None:
    folder = without_limits(folder, tmp_path / "plain") if is_plain else folder
    theirs, ours = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").model, load(folder)
    processor = Gemma4ImageProcessorPil.from_pretrained(folder)
    for size in ((96, 176), (16, 1120), (128, 128)):  # which the processor keeps
        generator = torch.Generator().manual_seed(size[0])
        pixels = torch.randint(256, (*size, 3), dtype=torch.uint8, generator=generator)
        features = processor([Image.fromarray(pixels.numpy())], return_tensors="pt")
        (expected,) = theirs.get_image_features(features["pixel_values"], features["image_position_ids"]).pooler_output
        torch.testing.assert_close(ours.image_encoder(pixels), expected, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("bidirectional", ["vision", None])
def test_how_images_are_read_follows_from_the_folder(bidirectional: str | None, folder: Path, tmp_path: Path) -> None:
    def apply(fields: Fields) -> None:
        fields["text_config"]["use_bidirectional_attention"] = bidirectional

    config = read_config.from_folder(changed(folder, tmp_path / "copy", "config.json", apply))
    assert config.images is not None
    assert config.images.input == ImageInput(
        token_id=VOCAB_SIZE + 2,
        token="<|image|>",
        placeholder="<|image|>",
        prefix="<|image>",
        suffix="<image|>",
        unit=16,
        max_pixels=70 * 16**2,
        fills=True,
        resample=3,
    )
    assert config.images.attends_within == (bidirectional == "vision")
    matrices = [each for each in load(folder).image_encoder.parameters() if each.dim() > 1]
    assert config.images.num_parameters == sum(each.numel() for each in matrices)


def test_an_encoder_of_audio_beside_that_of_images_is_not_read(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    tensors = load_file(folder / "model.safetensors") | {"model.audio_tower.layers.0.weight": torch.zeros(3)}
    save_file(tensors, tmp_path / "copy" / "model.safetensors", {"format": "pt"})
    assert isinstance(load(tmp_path / "copy"), ImageReader)


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"model_type": "siglip"}, "model_type siglip is not supported"),
        ("config.json", {"hidden_activation": "gelu"}, "hidden_activation gelu is not supported"),
        ("config.json", {"num_key_value_heads": 1}, "num_key_value_heads 1 is not supported; supported: 2"),
        ("config.json", {"head_dim": 18}, "vision_config.head_dim 18 is not a multiple of 4"),
        ("preprocessor_config.json", {"patch_size": 16}, "patch_size 16 is not supported; supported: 8"),
        ("preprocessor_config.json", {"pooling_kernel_size": 3}, "pooling_kernel_size 3 is not supported"),
        ("preprocessor_config.json", {"do_normalize": True}, "do_normalize True is not supported"),
    ],
)
def test_other_encoders_and_processors_are_refused_by_name(
    file: str, change: Fields, words: str, folder: Path, tmp_path: Path
) -> None:
    copy = changed(folder, tmp_path / "copy", file, lambda fields: fields.get("vision_config", fields).update(change))
    with pytest.raises(ValueError, match=words):
        read_config.from_folder(copy)
    assert read_config.from_folder(copy, language_model_only=True).images is None
