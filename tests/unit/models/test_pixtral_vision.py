"""Mistral 3's images: the encoder gives the rows of transformers, and what it is made of comes from the folder."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil

from proa.contract import ImageInput
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support.image_models import make_image_model
from support.tiny_models import VOCAB_SIZE

Fields = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("mistral3"), "mistral3", seed=4)


def load(folder: Path) -> Any:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


@pytest.mark.parametrize("size", [(16, 32), (48, 80), (128, 16)])
def test_the_encoder_gives_the_rows_of_transformers_with_embeddings_between_them(
    folder: Path, size: tuple[int, int]
) -> None:
    theirs, ours = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").model, load(folder)
    generator = torch.Generator().manual_seed(size[0])
    pixels = torch.randint(256, (*size, 3), dtype=torch.uint8, generator=generator)
    features = PixtralImageProcessorPil.from_pretrained(folder)([Image.fromarray(pixels.numpy())], return_tensors="pt")
    with torch.inference_mode():
        (expected,) = theirs.get_image_features(features["pixel_values"], torch.tensor([size])).pooler_output
        rows = ours.image_encoder(pixels)
    row_end = theirs.get_input_embeddings().weight[VOCAB_SIZE + 1]
    grid = torch.cat((rows, row_end[None])).view(size[0] // 16, size[1] // 16 + 1, -1)
    torch.testing.assert_close(grid[:, :-1].flatten(0, 1), expected, atol=2e-4, rtol=1e-4)
    assert (grid[:, -1] == row_end).all()


def test_how_images_are_read_follows_from_the_folder(folder: Path) -> None:
    images = read_config.from_folder(folder).images
    assert images is not None
    assert images.input == ImageInput(
        token_id=VOCAB_SIZE,
        token="[IMG]",
        placeholder="[IMG]",
        suffix="[IMG_END]",
        row_end_id=VOCAB_SIZE + 1,
        row_end="[IMG_BREAK]",
        unit=16,
        max_side=128,
        resample=3,
    )
    matrices = sum(tensor.numel() for tensor in load(folder).image_encoder.parameters() if tensor.dim() > 1)
    assert images.num_parameters == matrices


def without_row_ends(fields: Fields) -> None:
    fields["added_tokens"] = [token for token in fields["added_tokens"] if token["content"] != "[IMG_BREAK]"]


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", lambda fields: fields["vision_config"].update(model_type="clip"), "model_type clip is not"),
        ("config.json", lambda fields: fields["vision_config"].update(hidden_act="relu"), "hidden_act relu is not"),
        ("config.json", lambda fields: fields.update(vision_feature_layer=-2), "vision_feature_layer -2 is not"),
        ("config.json", lambda fields: fields.update(projector_hidden_act="silu"), "projector_hidden_act silu is not"),
        ("preprocessor_config.json", lambda fields: fields.update(patch_size=14), "patch_size 14 is not supported"),
        ("preprocessor_config.json", lambda fields: fields.update(size={"height": 9, "width": 9}), "size .* is not"),
        ("tokenizer.json", without_row_ends, r"the tokenizer has no token \[IMG_BREAK\]"),
    ],
)
def test_other_encoders_and_processors_are_refused_by_name(
    file: str, change: Callable[[Fields], object], words: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / file
    fields: Fields = json.loads(path.read_text())
    change(fields)
    path.write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=words):
        read_config.from_folder(tmp_path / "copy")
    assert read_config.from_folder(tmp_path / "copy", language_model_only=True).images is None
