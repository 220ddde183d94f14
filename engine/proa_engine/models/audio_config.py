"""AudioConfig: how a model reads audio, from config.json, preprocessor_config.json and generation_config.json."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proa.contract import AudioInput
from proa_engine.models.image_config import ImageConfig

if TYPE_CHECKING:  # they import torch, and the server reads an AudioConfig
    from proa_engine.layers.weights import Weights
    from proa_engine.models.base import AudioEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class AudioConfig:
    input: AudioInput
    embedding_width: int  # values that the encoder makes of one token
    alignment_heads: tuple[tuple[int, int], ...] = ()  # layers and heads of cross-attention that read what is said
    # Estimates, of which a CPU's memory is divided before anything is loaded.
    num_parameters: int = 0  # of the encoder
    token_values: int = 0  # that the encoder holds at its peak, for each token of an audio


def placed(images: ImageConfig | None, audios: AudioConfig | None) -> list[ImageConfig | AudioConfig]:
    """Those of them whose tokens stand in prompts."""
    audios_in_prompts = audios if audios and not audios.input.cross_attention else None
    return [each for each in (images, audios_in_prompts) if each]


class AudioEncoderOptions(Protocol):
    """Declares an `AudioEncoder`: a frozen dataclass."""

    def config(self) -> AudioConfig: ...

    def make(self, weights: "Weights") -> "AudioEncoder":
        """`weights` are those of the whole checkpoint."""
        ...
