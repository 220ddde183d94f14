"""Parts of Qwen's models of images: the encoder, its patches, three positions, configuration, loading, and refusals."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5TextRotaryEmbedding
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLTextRotaryEmbedding

from proa.contract import ImageInput
from proa_engine.config import LoadFormat
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.rotary import RopeConfig, RotaryTable
from proa_engine.layers.vision import normalised, patchify
from proa_engine.models import read_config
from proa_engine.models.base import ImageReader
from proa_engine.models.loader import load_model
from support.image_models import make_image_model
from support.paged_model import PagedModel
from support.tiny_models import VOCAB_SIZE

SIZES = ((16, 16), (48, 80), (160, 32))  # pixels, squares of 16 a token
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_model(tmp_path_factory.mktemp("qwen3_vl"), "qwen3_vl", seed=4)


@pytest.fixture(scope="module")
def windowed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two layers attend within windows of 2 x 2 tokens, the one between them to the whole image."""
    return make_image_model(tmp_path_factory.mktemp("qwen2_5_vl"), "qwen2_5_vl", seed=4)


def load(folder: Path, load_format: LoadFormat = "auto", *, language_model_only: bool = False) -> Any:
    return load_model(
        folder,
        read_config.from_folder(folder, language_model_only=language_model_only),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        load_format=load_format,
        report=lambda line: None,
    )


def random_pixels(height: int, width: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(height)
    return torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=generator)


def changed(folder: Path, target: Path, file: str, change: Callable[[Fields], object]) -> Path:
    """A copy of `folder` with other fields in a file."""
    shutil.copytree(folder, target)
    fields: Fields = json.loads((target / file).read_text())
    change(fields)
    (target / file).write_text(json.dumps(fields))
    return target


@pytest.mark.parametrize("model", ["folder", "windowed"])
@pytest.mark.parametrize("size", SIZES)
def test_the_encoder_gives_the_rows_of_transformers(
    model: str, size: tuple[int, int], request: pytest.FixtureRequest
) -> None:
    folder: Path = request.getfixturevalue(model)
    theirs = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager").model.visual
    pixels = random_pixels(*size)
    processor = Qwen2VLImageProcessorPil.from_pretrained(folder, size={"shortest_edge": 1, "longest_edge": 10**6})
    features = processor([Image.fromarray(pixels.numpy())], return_tensors="pt")
    with torch.inference_mode():
        result = theirs(features["pixel_values"], grid_thw=features["image_grid_thw"])
        expected = torch.cat((result.pooler_output, *getattr(result, "deepstack_features", ())), 1)
        rows = load(folder).image_encoder(pixels)
    torch.testing.assert_close(rows, expected, atol=2e-4, rtol=1e-4)


def test_patches_are_those_of_the_processor() -> None:
    mean, std = (0.48, 0.45, 0.4), (0.26, 0.27, 0.28)
    pixels = random_pixels(24, 40)
    processor = Qwen2VLImageProcessorPil(patch_size=4, do_resize=False, image_mean=mean, image_std=std)
    features = processor([Image.fromarray(pixels.numpy())], return_tensors="pt")
    expected = features["pixel_values"].view(-1, 3, 2, 16)  # the second frame repeats the first
    patches = patchify(normalised(pixels, torch.tensor(mean), torch.tensor(std), 1 / 255), 4, 2)
    for frame in range(2):
        torch.testing.assert_close(patches, expected[:, :, frame].flatten(1), atol=1e-6, rtol=0)


@pytest.mark.parametrize(
    ("architecture", "theirs", "head_dim", "share", "sections"),
    [
        ("qwen2_5_vl_text", Qwen2_5_VLRotaryEmbedding, 128, 1.0, (16, 24, 24)),
        ("qwen3_vl_text", Qwen3VLTextRotaryEmbedding, 128, 1.0, (24, 20, 20)),
        ("qwen3_5_text", Qwen3_5TextRotaryEmbedding, 256, 0.25, (11, 11, 10)),
    ],
)
def test_three_positions_rotate_as_in_transformers(
    architecture: str, theirs: Any, head_dim: int, share: float, sections: tuple[int, ...]
) -> None:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share, "mrope_section": list(sections)}
    embedding = theirs(AutoConfig.for_model(architecture, head_dim=head_dim, rope_parameters=rope))
    positions = torch.randint(100, (3, 50), generator=torch.Generator().manual_seed(0))
    cos, sin = embedding(torch.zeros(1), positions[:, None])
    dim = int(head_dim * share)
    take_turns = architecture != "qwen2_5_vl_text"
    config = RopeConfig(dim=dim, theta=1e4, sections=sections, sections_take_turns=take_turns)
    rotation = RotaryTable(config, 100, torch.device("cpu"))(positions)
    torch.testing.assert_close(rotation.cos, cos[0], atol=1e-6, rtol=0)
    torch.testing.assert_close(rotation.sin[:, dim // 2 :], sin[0, :, dim // 2 :], atol=1e-6, rtol=0)
    torch.testing.assert_close(rotation.sin[:, : dim // 2], -sin[0, :, : dim // 2], atol=1e-6, rtol=0)


def test_three_equal_positions_have_the_bits_of_one() -> None:
    table = RotaryTable(RopeConfig(dim=16, sections=(4, 2, 2)), 100, torch.device("cpu"))
    positions = torch.arange(100)
    one, three = table(positions), table(positions.expand(3, -1))
    assert torch.equal(one.cos, three.cos)
    assert torch.equal(one.sin, three.sin)


def test_how_images_are_read_follows_from_the_folder(folder: Path) -> None:
    images = read_config.from_folder(folder).images
    assert images is not None
    assert images.input == ImageInput(
        token_id=VOCAB_SIZE + 2,
        token="<|image_pad|>",
        placeholder="<|image_pad|>",
        unit=16,
        min_pixels=32 * 32,
        max_pixels=128 * 128,
        resample=3,
    )
    assert images.embedding_width == 3 * 64  # two layers of DeepStack
    assert images.has_three_positions


@pytest.mark.parametrize("model", ["folder", "windowed"])
def test_the_number_of_parameters_is_that_of_the_matrices(model: str, request: pytest.FixtureRequest) -> None:
    folder: Path = request.getfixturevalue(model)
    images = read_config.from_folder(folder).images
    assert images is not None
    matrices = sum(tensor.numel() for tensor in load(folder).image_encoder.parameters() if tensor.dim() > 1)
    assert images.num_parameters == matrices


def test_the_file_of_the_whole_processor_wins(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    processor = {"min_pixels": 256, "max_pixels": 4096, "resample": 2}
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": processor}))
    images = read_config.from_folder(copy).images
    assert images is not None
    assert (images.input.min_pixels, images.input.max_pixels, images.input.resample) == (256, 4096, 2)


def test_without_a_processor_the_defaults_are_those_of_transformers(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "preprocessor_config.json").unlink()
    read, theirs = read_config.from_folder(copy), Qwen2VLImageProcessorPil()
    encoder: Any = read.image_encoder
    assert {"shortest_edge": encoder.input.min_pixels, "longest_edge": encoder.input.max_pixels} == dict(theirs.size)
    assert (encoder.scaling.mean, encoder.scaling.std) == (tuple(theirs.image_mean), tuple(theirs.image_std))
    assert (encoder.scaling.scale, encoder.input.resample) == (theirs.rescale_factor, theirs.resample)


@pytest.mark.parametrize("model_type", ["qwen2_5_vl", "qwen3_vl", "qwen3_5"])
def test_tokens_of_images_have_the_ids_of_transformers_where_none_is_named(model_type: str, tmp_path: Path) -> None:
    model = make_image_model(tmp_path / "model", model_type)
    copy = changed(model, tmp_path / "copy", "config.json", lambda fields: fields.pop("image_token_id"))
    images = read_config.from_folder(copy).images
    assert images is not None
    assert images.input.token_id == AutoConfig.for_model(model_type).image_token_id


@pytest.mark.parametrize(
    ("file", "change", "words"),
    [
        ("config.json", {"hidden_act": "gelu"}, "hidden_act gelu is not supported; supported: gelu_pytorch_tanh"),
        ("config.json", {"in_channels": 1}, "in_channels 1 is not supported; supported: 3"),
        ("config.json", {"out_hidden_size": 32}, "out_hidden_size 32 is not supported; supported: 64"),
        ("config.json", {"num_heads": 3}, "vision_config.hidden_size 32 is not a multiple of 4 x 3 heads"),
        ("config.json", {"patch_size": [8, 4]}, r"patch_size \[8, 4\] is not supported"),
        ("preprocessor_config.json", {"patch_size": 14}, "patch_size 14 is not supported; supported: 8"),
        ("preprocessor_config.json", {"merge_size": 4}, "merge_size 4 is not supported; supported: 2"),
        ("preprocessor_config.json", {"do_normalize": False}, "do_normalize False is not supported; supported: True"),
    ],
)
def test_other_encoders_and_processors_are_refused_by_name(
    file: str, change: Fields, words: str, folder: Path, tmp_path: Path
) -> None:
    def apply(fields: Fields) -> None:
        fields.get("vision_config", fields).update(change)

    copy = changed(folder, tmp_path / "copy", file, apply)
    with pytest.raises(ValueError, match=words):
        read_config.from_folder(copy)
    assert read_config.from_folder(copy, language_model_only=True).images is None


@pytest.mark.parametrize(
    ("model", "change", "words"),
    [
        ("folder", {"mrope_interleaved": False}, "mrope_interleaved False is not supported; supported: True"),
        ("windowed", {"mrope_interleaved": True}, "mrope_interleaved True is not supported; supported: False"),
        ("windowed", {"mrope_section": [2, 3, 4]}, r"mrope_section \[2, 3, 4\] is not supported: its sum must be 8"),
    ],
)
def test_sections_of_another_kind_are_refused(
    model: str, change: Fields, words: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    def apply(fields: Fields) -> None:
        fields["text_config"]["rope_parameters"].update(change)

    copy = changed(request.getfixturevalue(model), tmp_path / "copy", "config.json", apply)
    with pytest.raises(ValueError, match=words):
        read_config.from_folder(copy)


def test_a_configuration_as_released_is_read_as_one_that_the_library_saved(windowed: Path, tmp_path: Path) -> None:
    """With the text model's fields beside the others, and older names of the rotation's."""

    def apply(fields: Fields) -> None:
        text = fields.pop("text_config")
        sections = text.pop("rope_parameters")["mrope_section"]
        fields.update(text | fields | {"rope_theta": 1e4, "rope_scaling": {"type": "mrope", "mrope_section": sections}})

    copy = changed(windowed, tmp_path / "copy", "config.json", apply)
    saved, released = read_config.from_folder(windowed), read_config.from_folder(copy)
    assert released.image_encoder == saved.image_encoder
    assert released.decoder == saved.decoder
    text = load(copy, language_model_only=True)
    assert not isinstance(text, ImageReader)


def test_the_language_model_alone_has_the_bits_of_the_whole_on_text(folder: Path) -> None:
    whole, alone = load(folder), load(folder, language_model_only=True)
    assert [isinstance(model, ImageReader) for model in (whole, alone)] == [True, False]
    assert sum(1 for _ in alone.parameters()) < sum(1 for _ in whole.parameters())
    hidden = [PagedModel(model).prefill([1, 2, 3] * 20) for model in (whole, alone)]
    assert torch.equal(*hidden)


def test_a_checkpoint_without_the_encoder_is_a_model_of_text(folder: Path, tmp_path: Path) -> None:
    copy = rewritten(folder, tmp_path / "copy", lambda name, tensor: None if "visual" in name else tensor)
    assert read_config.from_folder(copy).images is None
    assert not isinstance(load(copy), ImageReader)


def test_tensors_of_the_encoder_that_do_not_fit_are_named(folder: Path, tmp_path: Path) -> None:
    weight = "model.visual.blocks.1.mlp.linear_fc1.weight"

    def apply(name: str, tensor: torch.Tensor) -> torch.Tensor | None:
        if name == "model.visual.merger.norm.bias":
            return None
        return tensor.to(torch.float8_e4m3fn) if name == weight else tensor

    copy = rewritten(folder, tmp_path / "copy", apply, {"model.visual.extra.weight": torch.zeros(3)})
    with pytest.raises(ValueError, match=r"missing model.visual.merger.norm.bias \[32\]") as raised:
        load(copy)
    assert f"{weight} is stored as F8_E4M3, not as float32" in str(raised.value)
    assert "unexpected model.visual.extra.weight" in str(raised.value)


@torch.inference_mode()
def test_dummy_weights_make_an_encoder_that_runs(folder: Path) -> None:
    rows = load(folder, "dummy").image_encoder(random_pixels(32, 48))
    assert rows.shape == (6, 3 * 64)
    assert rows.isfinite().all()


def rewritten(
    folder: Path,
    target: Path,
    change: Callable[[str, torch.Tensor], torch.Tensor | None],
    added: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A copy of `folder` with other tensors; None: without it."""
    shutil.copytree(folder, target)
    tensors = {name: change(name, tensor) for name, tensor in load_file(target / "model.safetensors").items()}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept | (added or {}), target / "model.safetensors")
    return target
