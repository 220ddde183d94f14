"""ImageFiles and AudioFiles: what a model's folder says of images, and of audio, besides config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proa_engine.layers.vision import PixelScaling
from proa_engine.models.fields import require
from proa_engine.sources.folders import MAX_TOKENIZER_BYTES, read_json


@dataclass(frozen=True, slots=True)
class ImageFiles:
    processor: Mapping[str, Any] = field(default_factory=dict)  # fields of the image processor; empty: no such file
    tokens: Mapping[int, str] = field(default_factory=dict)  # texts of added tokens, as far as they are known

    @classmethod
    def from_folder(cls, folder: Path) -> "ImageFiles":
        """Read processor_config.json or preprocessor_config.json, and the added tokens of the tokenizer."""
        processor = (read_json(folder / "processor_config.json") or {}).get("image_processor")
        return cls(processor or read_json(folder / "preprocessor_config.json") or {}, added_tokens(folder))

    def resample(self, default: int) -> int:
        """Pillow's number of the filter for resizing. `default`: where the processor's file has none."""
        number = self.processor.get("resample")
        return default if number is None else number

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


@dataclass(frozen=True, slots=True)
class AudioFiles:
    """What a model's folder says of audio besides config.json."""

    extractor: Mapping[str, Any] = field(default_factory=dict)  # fields of the feature extractor; empty: no such file
    generation: Mapping[str, Any] = field(default_factory=dict)  # fields of generation_config.json
    tokens: Mapping[int, str] = field(default_factory=dict)  # texts of added tokens, as far as they are known

    @classmethod
    def from_folder(cls, folder: Path, generation: Mapping[str, Any]) -> "AudioFiles":
        """Read processor_config.json or preprocessor_config.json."""
        extractor = (read_json(folder / "processor_config.json") or {}).get("feature_extractor")
        extractor = extractor or read_json(folder / "preprocessor_config.json") or {}
        return cls(extractor, generation, added_tokens(folder))


def added_tokens(folder: Path) -> dict[int, str]:
    try:
        added = (read_json(folder / "tokenizer_config.json") or {}).get("added_tokens_decoder")
        if added:
            return {int(token_id): token["content"] for token_id, token in added.items()}
        tokenizer = read_json(folder / "tokenizer.json", MAX_TOKENIZER_BYTES) or {}
        return {token["id"]: token["content"] for token in tokenizer.get("added_tokens") or ()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the added tokens in {folder} cannot be read: {type(error).__name__}: {error}") from error
