"""Where the tensors of a text model are in a checkpoint, by their names. Does not import torch."""

from collections.abc import Callable
from typing import NamedTuple


class TextPrefix(NamedTuple):
    """How names begin, without the dot behind: of the decoder's tensors (empty: they have no prefix), and the LM
    head's."""

    decoder: str
    head: str


_OF_LARGER_MODELS = (
    TextPrefix("model.language_model", "lm_head"),
    TextPrefix("language_model.model", "language_model.lm_head"),
)
_ALONE = TextPrefix("", "lm_head")  # as sentence-transformers saves it
_OF_TEXT_MODEL = TextPrefix("model", "lm_head")


def text_prefix(has: Callable[[str], bool]) -> TextPrefix:
    """`has` says whether the checkpoint has a tensor of that name."""
    for prefix in _OF_LARGER_MODELS:
        if has(f"{prefix.decoder}.embed_tokens.weight"):
            return prefix
    return _ALONE if has("embed_tokens.weight") else _OF_TEXT_MODEL
