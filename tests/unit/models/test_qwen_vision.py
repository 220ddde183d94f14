"""Qwen2.5-VL, Qwen3-VL and Qwen3.5 with images give the logits of transformers in float32."""

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
from support.image_models import QWEN_TOKENS, make_image_model
from support.paged_model import CachedSequence, EncodedImage, PagedModel
from support.tiny_models import VOCAB_SIZE

TOLERANCE = 1e-4  # logits are of the order of 3
UNIT = 16  # pixels
SIZES = ((48, 80), (32, 32), (112, 16))
VISION_START, VISION_END, IMAGE_PAD, _ = range(VOCAB_SIZE, VOCAB_SIZE + len(QWEN_TOKENS))


def random_pixels(height: int, width: int, seed: int) -> torch.Tensor:
    return torch.randint(256, (height, width, 3), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


IMAGES = [random_pixels(*size, seed) for seed, size in enumerate(SIZES)]


def prompt(images: Sequence[torch.Tensor], *, seed: int = 0) -> tuple[list[int], list[int]]:
    """Texts of 1, 6, 11, … tokens, an image between each two; and where the images begin."""
    generator = torch.Generator().manual_seed(seed)
    token_ids: list[int] = []
    offsets = []
    for index in range(len(images) + 1):
        token_ids += torch.randint(256, (1 + 5 * index,), generator=generator).tolist()
        if index < len(images):
            height, width, _ = images[index].shape
            offsets.append(len(token_ids) + 1)
            token_ids += [VISION_START, *[IMAGE_PAD] * (height * width // UNIT**2), VISION_END]
    return token_ids, offsets


def load(folder: Path, **options: Any) -> Any:
    return load_model(
        folder,
        read_config.from_folder(folder, **options),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def sequence_of(model: ImageReader, images: Sequence[torch.Tensor]) -> CachedSequence:
    token_ids, offsets = prompt(images)
    encoded = []
    for pixels, offset in zip(images, offsets, strict=True):
        embeddings = model.image_encoder(pixels)
        height, width, _ = pixels.shape
        encoded.append(EncodedImage(MediaSpan(b"", offset, len(embeddings), (height, width, 3)), embeddings))
    return CachedSequence(token_ids, images=encoded)


def processed(folder: Path, images: Sequence[torch.Tensor]) -> Any:
    """`pixel_values` and `image_grid_thw` of transformers."""
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    processor = Qwen2VLImageProcessorPil.from_pretrained(folder)
    return processor([Image.fromarray(pixels.numpy()) for pixels in images], return_tensors="pt")


def expected_logits(folder: Path, images: Sequence[torch.Tensor]) -> torch.Tensor:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation="eager")
    token_ids = torch.tensor([prompt(images)[0]])
    inputs = dict(processed(folder, images)) if images else {}
    with torch.inference_mode():
        logits: torch.Tensor = model(token_ids, mm_token_type_ids=(token_ids == IMAGE_PAD).int(), **inputs).logits
    return logits[0]


@pytest.mark.parametrize(
    ("architecture", "num_images"),
    [
        *[("qwen3_vl", number) for number in (0, 1, 3)],
        *[("qwen2_5_vl", 3), ("qwen3_vl_moe", 3), ("qwen3_5", 3), ("qwen3_5_moe", 3)],
    ],
)
def test_logits_of_prompts_with_images_equal_those_of_transformers(
    architecture: str, num_images: int, tmp_path: Path
) -> None:
    folder = make_image_model(tmp_path, architecture, seed=3)
    model, images = load(folder), IMAGES[:num_images]
    with torch.inference_mode():
        batch = PagedModel(model, image_config=read_config.from_folder(folder).images)
        sequence, other = sequence_of(model, images), sequence_of(model, [])
        parts: list[torch.Tensor] = []
        while sequence.num_computed < len(sequence.token_ids):
            num_tokens = min(11, len(sequence.token_ids) - sequence.num_computed)
            step = [(sequence, num_tokens)]
            if other.num_computed < len(other.token_ids):
                step.append((other, 1))
            parts.append(batch.step(step)[0])
        logits = model.compute_logits(torch.cat(parts))
    torch.testing.assert_close(logits, expected_logits(folder, images), atol=TOLERANCE, rtol=0)
