"""Gemma 3 with images gives the logits of transformers in float32; so does its image encoder alone."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from proa_engine.core.types import MediaSpan
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import ImageReader
from proa_engine.models.loader import load_model
from support.image_models import make_image_model
from support.paged_model import CachedSequence, EncodedImage, PagedModel
from support.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4  # logits are of the order of 3
SIDE, NUM_TOKENS = 64, 16  # of an image
BEGIN, END, SOFT = range(VOCAB_SIZE, VOCAB_SIZE + 3)
IMAGES = [
    torch.randint(256, (SIDE, SIDE, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    for seed in range(3)
]


def prompt(num_images: int) -> tuple[list[int], list[int]]:
    """Texts of 3, 8, … tokens, an image between each two; and where the images begin."""
    generator = torch.Generator().manual_seed(1)
    token_ids: list[int] = []
    offsets = []
    for index in range(num_images + 1):
        token_ids += torch.randint(256, (3 + 5 * index,), generator=generator).tolist()
        if index < num_images:
            offsets.append(len(token_ids) + 1)
            token_ids += [BEGIN, *[SOFT] * NUM_TOKENS, END]
    return token_ids, offsets


def load(folder: Path) -> Any:
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def sequence_of(model: ImageReader, images: Sequence[torch.Tensor]) -> CachedSequence:
    token_ids, offsets = prompt(len(images))
    spans = [MediaSpan(b"", offset, NUM_TOKENS, (SIDE, SIDE, 3)) for offset in offsets]
    encoded = [EncodedImage(span, model.image_encoder(pixels)) for span, pixels in zip(spans, images, strict=True)]
    return CachedSequence(token_ids, images=encoded)


def theirs(folder: Path) -> Any:
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")


def processed(folder: Path, images: Sequence[torch.Tensor]) -> torch.Tensor:
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    processor = Gemma3ImageProcessorPil.from_pretrained(folder)
    pixels: torch.Tensor = processor(
        [Image.fromarray(image.numpy()) for image in images], return_tensors="pt"
    ).pixel_values
    return pixels


@torch.inference_mode()
def expected_logits(folder: Path, images: Sequence[torch.Tensor]) -> torch.Tensor:
    token_ids = torch.tensor([prompt(len(images))[0]])
    inputs = {"pixel_values": processed(folder, images)} if images else {}
    logits: torch.Tensor = theirs(folder)(token_ids, token_type_ids=(token_ids == SOFT).long(), **inputs).logits
    return logits[0]


@torch.inference_mode()
def test_encoded_images_equal_those_of_transformers(tmp_path: Path) -> None:
    folder = make_image_model(tmp_path, "gemma3", seed=3)
    ours = torch.stack([load(folder).image_encoder(pixels) for pixels in IMAGES])
    expected = theirs(folder).model.get_image_features(processed(folder, IMAGES)).pooler_output
    torch.testing.assert_close(ours, expected, atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize(("num_images", "window"), [(0, 24), (1, 24), (3, 24), (3, 6)])
def test_logits_of_prompts_with_images_equal_those_of_transformers(
    num_images: int, window: int, tmp_path: Path
) -> None:
    """A window of 6 tokens is shorter than an image. A step may end anywhere but within an image."""
    folder = make_image_model(tmp_path, "gemma3", seed=3, sliding_window=window)
    model, images = load(folder), IMAGES[:num_images]
    batch = PagedModel(model, image_config=read_config.from_folder(folder).images)
    sequence, other = sequence_of(model, images), sequence_of(model, [])
    ends = [2, *(offset + NUM_TOKENS + more for offset in prompt(num_images)[1] for more in (0, 3))]
    parts: list[torch.Tensor] = []
    for end in (*ends, len(sequence.token_ids)):
        step = [(sequence, end - sequence.num_computed)]
        if other.num_computed < len(other.token_ids):
            step.append((other, 1))
        parts.append(batch.step(step)[0])
    logits = model.compute_logits(torch.cat(parts))
    torch.testing.assert_close(logits, expected_logits(folder, images), atol=TOLERANCE, rtol=0)


@torch.inference_mode()
@pytest.mark.parametrize("num_left", [1, 7])
def test_a_prompt_goes_on_behind_cached_tokens_that_end_within_an_image(num_left: int, tmp_path: Path) -> None:
    folder = make_image_model(tmp_path, "gemma3", seed=3)
    model, config = load(folder), read_config.from_folder(folder)
    batch = PagedModel(model, image_config=config.images)
    sequence = sequence_of(model, IMAGES[:2])
    length, image_end = len(sequence.token_ids), prompt(2)[1][1] + NUM_TOKENS
    (whole,) = batch.step([(sequence, length)])
    again = CachedSequence(sequence.token_ids, image_end - num_left, sequence.blocks[:], images=sequence.images)
    (rest,) = batch.step([(again, num_left)])
    torch.testing.assert_close(rest, whole[image_end - num_left : image_end], atol=TOLERANCE, rtol=0)
    (rest,) = batch.step([(again, length - image_end)])
    torch.testing.assert_close(rest, whole[image_end:], atol=TOLERANCE, rtol=0)


def test_how_images_are_read_comes_from_the_folder(tmp_path: Path) -> None:
    images = read_config.from_folder(make_image_model(tmp_path, "gemma3")).images
    assert images is not None
    assert images.attends_within
    assert (images.input.side, images.input.unit, images.input.resample) == (SIDE, SIDE // 4, 2)
    assert (images.input.placeholder, images.input.token) == ("<start_of_image>", "<image_soft_token>")
    assert (images.input.prefix, images.input.suffix) == ("\n\n<start_of_image>", "<end_of_image>\n\n")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"do_pan_and_scan": True}, "do_pan_and_scan True is not supported"),
        ({"size": {"height": 32, "width": 32}}, "height 32 of the image processor"),
    ],
)
def test_processors_that_the_encoder_cannot_follow_are_refused(
    fields: dict[str, Any], error: str, tmp_path: Path
) -> None:
    folder = make_image_model(tmp_path, "gemma3")
    path = folder / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))
    with pytest.raises(ValueError, match=error):
        read_config.from_folder(folder)
