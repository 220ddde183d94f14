"""The interfaces of layers that read a model's hidden states and propose the tokens that follow: HiddenDrafter, one
layer that proposes one token after another, and BlockDrafter, layers that propose a block of tokens at once.

An entry of a `HiddenDrafter` is made of the state of token i and of token i + 1. It lies in the drafter's caches where
the model's keys of token i lie in the model's. It is stored without the rest of the layer (`observe`). What the whole
layer returns of it has the logits of token i + 2, and stands for the state of token i + 1 in the next entry while there
is none: so one layer proposes any number of tokens.

An entry of a `BlockDrafter` is made of the state of token i alone, and lies at the same place.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, runtime_checkable

import torch

from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.parallel import LayerContext
from proa_engine.layers.weights import LinearMethod, Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.quantization.methods import linear_method
from proa_engine.models.quantization.read import read_quantization

LIBRARY_TYPE: Final = "speculators_model_type"  # a field of every config.json of the library `speculators`


class Drafter(Protocol):
    """One rank's shard of a drafter with loaded weights. Stateless, as `CausalLM` is."""

    taps: tuple[int, ...]  # which states it reads, as `Taps.layers`; empty: the model's hidden states

    def cache_layers(self) -> tuple[CacheLayer, ...]: ...

    def parameters(self) -> Iterator[torch.Tensor]:
        """Yield each of this rank's weights once, also those that it shares with the model."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Entries:
    """What T entries of a `HiddenDrafter` are made of."""

    read: torch.Tensor  # [T, `read_size`]: the tokens' states
    input_ids: torch.Tensor  # [T] int64: of the tokens behind them
    positions: torch.Tensor  # [T] int64: of the tokens themselves


class HiddenDrafter(Drafter, Protocol):
    def combine(self, states: torch.Tensor) -> torch.Tensor:
        """What the model has left for the drafter, `Taps.states` or hidden states [T, …] -> what entries read,
        [T, `read_size`]."""
        ...

    @property
    def read_size(self) -> int: ...

    def observe(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata, /) -> None:
        """Write the entries of T tokens to `caches`, one for each of `cache_layers`."""
        ...

    def __call__(self, entries: Entries, caches: Sequence[LayerCache], metadata: AttentionMetadata, /) -> torch.Tensor:
        """As `observe`. Also returns what has the logits of the entries and what the next entries read,
        [T, `read_size`]. May overwrite `entries.read`."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, `read_size`] -> logits [R, vocab_size of the model], the same on every rank; -inf for tokens that
        the drafter does not know."""
        ...


@runtime_checkable
class BlockDrafter(Drafter, Protocol):
    mask_token_id: int  # stands for each token that is proposed, behind the request's last one
    samples_last: bool  # the first draft token is read off the request's last token, else off the first mask

    def observe(
        self,
        states: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        /,
    ) -> None:
        """Write the entries of T tokens to `caches`, of the states that the model has left, as in
        `HiddenDrafter.combine`."""
        ...

    def draft(
        self,
        input_ids: torch.Tensor,
        positions: torch.Tensor,
        caches: Sequence[LayerCache],
        metadata: AttentionMetadata,
        /,
    ) -> torch.Tensor:
        """Return what has the logits of decodes' tokens, [T, hidden_size]: of each request's last token and of masks.
        Writes their keys and values where the entries of these tokens will lie."""
        ...

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> logits [R, vocabulary of the drafter], the same on every rank."""
        ...

    def follow(self, logits: torch.Tensor, token_ids: torch.Tensor) -> torch.Tensor:
        """logits [R, vocabulary of the drafter] of the tokens behind `token_ids` [R] int64 -> [R, vocab_size of the
        model]; -inf for tokens that the drafter does not know."""
        ...


class NoDrafter:
    """In place of a `Drafter` where nothing reads the model's states."""

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return ()

    def parameters(self) -> Iterator[torch.Tensor]:
        return iter(())


class DrafterOptions(Protocol):
    """Declares a drafter: what its config.json says."""

    @property
    def hidden_size(self) -> int: ...

    @property
    def linear_method(self) -> LinearMethod: ...

    def is_unread(self, name: str) -> bool:
        """Whether it has no use for a checkpoint's tensor."""
        ...

    def make(self, weights: Weights, model: DecoderForCausalLM, context: LayerContext) -> HiddenDrafter | BlockDrafter:
        """Load it. `model` has the embedding and the LM head that the checkpoint may lack."""
        ...


def check_sizes(target: ModelConfig, hidden_size: int, vocab_size: int) -> None:
    """Raise ValueError if a drafter that reads states of `hidden_size` values does not fit the model."""
    if hidden_size != target.hidden_size:
        raise ValueError(f"it reads states of {hidden_size} values, and the model's have {target.hidden_size}")
    if vocab_size != target.vocab_size:
        raise ValueError(f"it is for a vocabulary of {vocab_size} tokens, and the model's has {target.vocab_size}")


def own_linear_method(config: Mapping[str, Any], quantization: str | None) -> LinearMethod:
    """How the weights of a checkpoint that has only the drafter are stored. `config` is its config.json."""
    stored = config.get("quantization_config")
    return linear_method(read_quantization(stored, quantization), stored)
