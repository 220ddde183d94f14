"""Changes to the built-in model's weights that make it end its answers and its reasoning as a test needs it.

The input and output embeddings of a changed model are not tied, so that a token can be read as one and written as
another.
"""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

INPUT, OUTPUT = "model.embed_tokens.weight", "lm_head.weight"
_LOUD = 1000.0  # an embedding so long that what the layers add to it is nothing


class Weights:
    """Of a model's folder, in float32. `save` writes them back."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / "model.safetensors"
        tensors = {name: tensor.float() for name, tensor in load_file(self._path).items()}
        tensors.setdefault(OUTPUT, tensors[INPUT].clone())
        self._tensors = tensors

    def save(self) -> None:
        tensors = {name: tensor.bfloat16().contiguous() for name, tensor in self._tensors.items()}
        save_file(tensors, self._path, {"format": "pt"})

    def never_write(self, token_id: int) -> None:
        """Its logit is that of a token that is never the likeliest."""
        self._tensors[OUTPUT][token_id] = 0.0

    def read_as(self, token_id: int, other: int) -> None:
        self._tensors[INPUT][token_id] = self._tensors[INPUT][other]

    def follow(self, token_id: int, *following: int) -> None:
        """One of `following`, all equally likely, always comes after the token, and hardly ever elsewhere: the token's
        embedding has a direction of its own, which no layer changes much, and to which only their rows belong."""
        norm, output = self._tensors["model.norm.weight"], self._tensors[OUTPUT]
        direction = torch.randn(len(norm), generator=torch.Generator().manual_seed(token_id))
        direction /= direction.norm()
        self._tensors[INPUT][token_id] = direction * _LOUD
        state = direction * len(norm) ** 0.5 * norm  # what the output embeddings are multiplied with
        others = (output @ state).max()
        output[list(following)] = 2 * others * state / state.square().sum()
