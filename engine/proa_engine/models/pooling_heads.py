"""PoolingHeads: what follows the pooled hidden states: linear layers, lengths of 1, labels. All in float32."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError

import torch
import torch.nn.functional as F
from torch import Tensor

from proa.contract import PoolingTask
from proa_engine.kernels.products.linear import Linear
from proa_engine.layers.weights import WeightSource
from proa_engine.models.pooling_config import DenseConfig, PoolingConfig


class DenseHead:
    """A linear layer and its activation. On a CPU, a row's bits do not depend on the number of rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: str) -> None:
        """weight [out_features, in_features], bias [out_features]; `activation`: a class of `torch.nn`"""
        self.weight, self.bias = weight, bias
        self._product = Linear(weight, bias)
        self._activation = getattr(torch.nn, activation)()

    @classmethod
    def load(cls, config: DenseConfig, source: WeightSource) -> "DenseHead":
        weight = source.take("linear.weight", (config.out_features, config.in_features))
        bias = source.take("linear.bias", (config.out_features,)) if config.bias else None
        return cls(weight, bias, config.activation)

    def __call__(self, x: Tensor) -> Tensor:
        y: Tensor = self._activation(self._product(x))
        return y


@dataclass(frozen=True, slots=True)
class Score:
    """A decoder's layers for labels, in order."""

    layers: tuple[DenseHead, ...]

    @classmethod
    def load(cls, config: PoolingConfig, hidden_size: int, source: WeightSource) -> "Score":
        num_labels = len(config.labels)
        if not config.has_two_score_layers:
            return cls((DenseHead(source.take("score.weight", (num_labels, hidden_size)), None, "Identity"),))
        layers = []
        for name, size, activation in (("score.0", hidden_size, "ReLU"), ("score.2", num_labels, "Identity")):
            weight = source.take(f"{name}.weight", (size, hidden_size))
            layers.append(DenseHead(weight, source.take(f"{name}.bias", (size,)), activation))
        return cls(tuple(layers))

    def __call__(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


@dataclass(frozen=True, slots=True)
class SparseWeights:
    """BGE-M3's weights of tokens: a linear layer to one value, and ReLU."""

    layers: tuple[DenseHead]

    @classmethod
    def load(cls, path: Path, hidden_size: int, device: torch.device) -> "SparseWeights":
        """Read a pickle, of which nothing but tensors is read. Raises ValueError for another file."""
        try:
            stored = torch.load(path, map_location=device, weights_only=True)
            weight, bias = (stored[name].float() for name in ("weight", "bias"))
        except (AttributeError, EOFError, KeyError, RuntimeError, TypeError, UnpicklingError) as error:
            raise ValueError(f"{path} cannot be read: {error}") from error
        if (weight.shape, bias.shape) != ((1, hidden_size), (1,)):
            raise ValueError(f"{path} has a layer of {list(weight.shape)}, not of [1, {hidden_size}]")
        return cls((DenseHead(weight, bias, "ReLU"),))

    def __call__(self, x: Tensor) -> Tensor:
        return self.layers[0](x)


class PoolingHeads:
    """Computes results of pooled hidden states. `classify`: [n, hidden_size] -> [n, labels], if there are labels."""

    def __init__(
        self, config: PoolingConfig, dense: list[DenseHead], classify: Callable[[Tensor], Tensor] | None = None
    ) -> None:
        self._config = config
        self._dense = dense
        self._classify = classify

    def __call__(
        self, vectors: Tensor, task: PoolingTask, *, dimensions: int | None, use_activation: bool | None
    ) -> Tensor:
        """vectors [n, hidden_size] float32 -> [n, embedding_size or dimensions], or [n, labels]"""
        if task in (PoolingTask.CLASSIFY, PoolingTask.TOKEN_CLASSIFY):
            assert self._classify is not None
            if isinstance(self._classify, SparseWeights):
                return self._classify(vectors)
            return self._activate(self._classify(vectors), use_activation)
        for dense in self._dense:
            vectors = dense(vectors)
        vectors = vectors[:, :dimensions]
        normalizes = self._config.normalizes if use_activation is None else use_activation
        return F.normalize(vectors, dim=-1) if normalizes else vectors

    def parameters(self) -> Iterator[Tensor]:
        score = self._classify.layers if isinstance(self._classify, Score | SparseWeights) else ()
        for layer in (*self._dense, *score):
            yield from (tensor for tensor in (layer.weight, layer.bias) if tensor is not None)

    def _activate(self, logits: Tensor, use_activation: bool | None) -> Tensor:
        if not (self._config.gives_probabilities if use_activation is None else use_activation):
            return logits
        return logits.sigmoid() if self._config.is_multi_label else logits.softmax(dim=-1)
