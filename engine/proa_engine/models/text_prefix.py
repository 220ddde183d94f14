"""Where the tensors of a text model are in a checkpoint, by their names. Does not import torch."""

from collections.abc import Callable
from typing import NamedTuple


class TextPrefix(NamedTuple):
    """How names begin, without the dot behind: of the decoder's tensors (empty: they have no prefix), and the LM
    head's. The names of the embedding and of the list of layers are those within the decoder."""

    decoder: str
    head: str
    embedding: str = "embed_tokens"
    layers: str = "layers"

    @property
    def embedding_weight(self) -> str:
        return f"{self.decoder}.{self.embedding}.weight".lstrip(".")

    @property
    def of_layers(self) -> str:
        """How the names of the layers' tensors begin, with the dot."""
        return f"{self.decoder}.{self.layers}.".lstrip(".")


_OF_OTHERS = (
    TextPrefix("model.language_model", "lm_head"),  # of larger models, as is the next one
    TextPrefix("language_model.model", "language_model.lm_head"),
    TextPrefix("backbone", "lm_head", "embeddings"),  # of Nemotron-H
    TextPrefix("model.decoder", "proj_out"),  # of Whisper
    TextPrefix("thinker.model", "thinker.lm_head"),  # of Qwen3-ASR, by Qwen's own library
    TextPrefix("model", "output", "tok_embeddings"),  # of InternLM2
    TextPrefix("transformer", "lm_head", "wte", "h"),  # of EXAONE 3
    TextPrefix("transformer", "transformer.output_layer", "embedding.word_embeddings", "encoder.layers"),  # of ChatGLM
)
_ALONE = TextPrefix("", "lm_head")  # as sentence-transformers saves it
_OF_TEXT_MODEL = TextPrefix("model", "lm_head")


def text_prefix(has: Callable[[str], bool]) -> TextPrefix:
    """`has` says whether the checkpoint has a tensor of that name."""
    return next((prefix for prefix in (*_OF_OTHERS, _ALONE) if has(prefix.embedding_weight)), _OF_TEXT_MODEL)
