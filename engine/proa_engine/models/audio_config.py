"""AudioConfig: how a model reads audio, from config.json, preprocessor_config.json and generation_config.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from proa.contract import AudioInput
from proa_engine.sources.folders import read_json

if TYPE_CHECKING:  # they import torch, and the server reads an AudioConfig
    from proa_engine.layers.weights import Weights
    from proa_engine.models.base import AudioEncoder


@dataclass(frozen=True, slots=True)
class AudioFiles:
    """What a model's folder says of audio besides config.json."""

    extractor: Mapping[str, Any] = field(default_factory=dict)  # fields of the feature extractor; empty: no such file
    generation: Mapping[str, Any] = field(default_factory=dict)  # fields of generation_config.json

    @classmethod
    def from_folder(cls, folder: Path, generation: Mapping[str, Any]) -> "AudioFiles":
        """Read processor_config.json or preprocessor_config.json."""
        extractor = (read_json(folder / "processor_config.json") or {}).get("feature_extractor")
        return cls(extractor or read_json(folder / "preprocessor_config.json") or {}, generation)


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    input: AudioInput
    embedding_width: int  # values that the encoder makes of one token
    # Estimates, of which a CPU's memory is divided before anything is loaded.
    num_parameters: int = 0  # of the encoder
    token_values: int = 0  # that the encoder holds at its peak, for each token of an audio


class AudioEncoderOptions(Protocol):
    """Declares an `AudioEncoder`: a frozen dataclass."""

    def config(self) -> AudioConfig: ...

    def make(self, weights: "Weights") -> "AudioEncoder":
        """`weights` are those of the whole checkpoint."""
        ...
