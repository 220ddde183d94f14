"""ImageFiles: what a model's folder says of images besides config.json."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proa_engine.layers.vision import PixelScaling
from proa_engine.models.fields import require


@dataclass(frozen=True, slots=True)
class ImageFiles:
    processor: Mapping[str, Any] = field(default_factory=dict)  # fields of the image processor; empty: no such file
    tokens: Mapping[int, str] = field(default_factory=dict)  # texts of added tokens, as far as they are known

    @classmethod
    def from_folder(cls, folder: Path) -> "ImageFiles":
        """Read processor_config.json or preprocessor_config.json, and the added tokens of the tokenizer."""
        processor = _read(folder / "processor_config.json").get("image_processor")
        return cls(processor or _read(folder / "preprocessor_config.json"), _added_tokens(folder))

    def pixel_scaling(self, mean: tuple[float, ...], std: tuple[float, ...]) -> PixelScaling:
        """`mean` and `std` count where the processor's file has none. Raises ValueError, naming the field, for a
        processor that does not resize, rescale and normalise."""
        for name in ("do_resize", "do_rescale", "do_normalize"):
            require(self.processor, name, (True,))
        return PixelScaling(
            mean=tuple(self.processor.get("image_mean") or mean),
            std=tuple(self.processor.get("image_std") or std),
            scale=self.processor.get("rescale_factor") or 1 / 255,
        )


def _added_tokens(folder: Path) -> dict[int, str]:
    added = _read(folder / "tokenizer_config.json").get("added_tokens_decoder")
    if added:
        return {int(token_id): token["content"] for token_id, token in added.items()}
    return {token["id"]: token["content"] for token in _read(folder / "tokenizer.json").get("added_tokens") or ()}


def _read(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {}
    return fields
