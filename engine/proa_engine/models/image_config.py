"""ImageConfig: how a model reads images, from config.json and preprocessor_config.json."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from proa.contract import ImageInput

if TYPE_CHECKING:  # they import torch, and the server reads an ImageConfig
    from proa_engine.layers.weights import Weights
    from proa_engine.models.base import ImageEncoder


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageConfig:
    input: ImageInput
    embedding_width: int  # values that the encoder makes of one token
    # Estimates, of which a CPU's memory is divided before anything is loaded.
    num_parameters: int = 0  # of the encoder
    token_values: int = 0  # that the encoder holds at its peak, for each token of an image
    # The decoder rotates by three positions a token. Those of an image's tokens are its first token's position plus
    # (0, row, column) of their squares; the token after it has the position of its first one plus max(rows, columns).
    has_three_positions: bool = False
    # An image's tokens attend to all of it where `AttentionOptions.within_images` says so; one step computes them.
    attends_within: bool = False


class ImageEncoderOptions(Protocol):
    """Declares an `ImageEncoder`: a frozen dataclass."""

    @property
    def weights_name(self) -> str | tuple[str, ...]:
        """What the names of its tensors begin with in a checkpoint, or one of several such beginnings. A checkpoint
        without such tensors reads no images."""
        ...

    def config(self) -> ImageConfig: ...

    def make(self, weights: "Weights") -> "ImageEncoder":
        """`weights` are those of the whole checkpoint."""
        ...
