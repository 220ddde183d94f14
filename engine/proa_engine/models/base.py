"""CausalLM: the interface of models."""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

import torch

from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.cross_attention import CrossAttention


class CausalLM(Protocol):
    """One rank's shard of a language model with loaded weights. Stateless: the KV cache is passed to each call."""

    def __call__(
        self,
        inputs: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        /,
    ) -> torch.Tensor:
        """Token ids [T], positions [T] int64 -> hidden states [T, hidden_size], the same on every rank.

        A model with `ImageConfig.has_three_positions` also takes positions [3, T]: time, row and column of each token.

        Writes what the layers keep of the tokens to `caches`, one for each of `cache_layers`, and a decoder of this
        package writes the states that `metadata.taps` asks for.
        """
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocab_size] in the model's type, the same on every rank."""
        ...

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        """What each layer keeps on this rank."""
        ...

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each of this rank's weights once."""
        ...


class ImageEncoder(Protocol):
    """Encodes images for a decoder; all of its weights are on every rank."""

    def __call__(self, pixels: torch.Tensor) -> torch.Tensor:
        """pixels [height, width, 3] uint8 -> [tokens, `ImageConfig.embedding_width`] in the model's type."""
        ...

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each weight once."""
        ...


@runtime_checkable
class ImageReader(Protocol):
    """A `CausalLM` that reads images: it puts `AttentionMetadata.media` in the place of its tokens' embeddings.

    `parameters` yields the encoder's weights too.
    """

    image_encoder: ImageEncoder


class AudioEncoder(Protocol):
    """Encodes audios for a decoder; all of its weights are on every rank."""

    def __call__(self, samples: torch.Tensor) -> torch.Tensor:
        """samples [n] float32 -> [tokens, `AudioConfig.embedding_width`] in the model's type."""
        ...

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each weight once."""
        ...


@runtime_checkable
class AudioReader(Protocol):
    """A `CausalLM` that reads audio: it puts `AttentionMetadata.media` in the place of its tokens' embeddings, unless
    it is a `CrossReader`.

    `parameters` yields the encoder's weights too.
    """

    audio_encoder: AudioEncoder


@runtime_checkable
class CrossReader(AudioReader, Protocol):
    """A `CausalLM` whose tokens read an audio by cross-attention (`AttentionMetadata.audio`)."""

    def cross_layers(self, caches: Sequence[LayerCache], /) -> list[tuple[CrossAttention, LayerCache]]:
        """Each layer of cross-attention, in order, and its cache."""
        ...


@runtime_checkable
class StageModel(Protocol):
    """A `CausalLM` of which a rank may hold the layers of one pipeline stage alone.

    A call of the first stage takes token ids, of a later one the result of the stage before, [T, hidden_size]. Any of
    several stages returns its result for the next one. The last stage's is made hidden states by `finish` of the first.
    """

    def finish(self, result: torch.Tensor) -> torch.Tensor:
        """Any rows of the last stage's result [R, hidden_size] -> their hidden states, the same shape"""
        ...


@runtime_checkable
class Classifier(Protocol):
    """A model with a classification head of its own."""

    def classify(self, vectors: torch.Tensor) -> torch.Tensor:
        """Pooled hidden states [n, hidden_size] -> logits of the labels [n, labels] float32."""
        ...


class HasParameters(Protocol):
    def parameters(self) -> Iterator[torch.Tensor]: ...


def move_weights(model: HasParameters, device: torch.device) -> None:
    """Move the weights to another device. The model can run only on the device where it was loaded."""
    for tensor in model.parameters():
        if tensor.device != device:  # mkldnn's own layouts have no `data`
            tensor.data = tensor.data.to(device)
