"""What checkpoints of drafters have in common: whether they fit the model, and an embedding and an LM head that they
share with the model or have of their own, also of a part of its vocabulary."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from proa_engine.layers.embedding import LMHead, VocabParallelEmbedding, take_vocab_share
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.decoder import DecoderForCausalLM
from proa_engine.models.drafters.base import LIBRARY_TYPE, check_sizes


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterSizes:
    """Full sizes, before sharding."""

    hidden_size: int
    target_hidden_size: int
    vocab_size: int  # of the model
    draft_vocab_size: int


def fields_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The fields of a drafter's config.json that describe its layers."""
    fields: Mapping[str, Any] = config["transformer_layer_config"] if LIBRARY_TYPE in config else config
    return fields


def read_sizes(config: Mapping[str, Any], target: ModelConfig, taps: Sequence[int]) -> DrafterSizes:
    """Raises ValueError, naming it, for what does not fit the model `target`."""
    fields, num_layers = fields_of(config), len(target.layers)
    sizes = DrafterSizes(
        hidden_size=fields["hidden_size"],
        target_hidden_size=config.get("target_hidden_size") or fields["hidden_size"],
        vocab_size=fields["vocab_size"],
        draft_vocab_size=config.get("draft_vocab_size") or fields["vocab_size"],
    )
    check_sizes(target, sizes.target_hidden_size, sizes.vocab_size)
    if not all(0 <= tap <= num_layers for tap in taps):
        raise ValueError(f"it reads states before the layers {list(taps)}, and the model has {num_layers} layers")
    return sizes


def make_embedding(
    weights: Weights, model: DecoderForCausalLM, sizes: DrafterSizes, parallel: ParallelContext
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The checkpoint's own, or the model's."""
    if not weights.has("embed_tokens.weight") and sizes.hidden_size == sizes.target_hidden_size:
        return model.embedding
    rows = take_vocab_share(weights / "embed_tokens", sizes.vocab_size, sizes.hidden_size, parallel)
    return VocabParallelEmbedding(rows, parallel)


class DraftHead:
    """The LM head of the checkpoint, of a vocabulary of its own or of the model's; or the model's."""

    def __init__(
        self, weights: Weights, model: DecoderForCausalLM, sizes: DrafterSizes, parallel: ParallelContext
    ) -> None:
        self.vocab_size, size = sizes.vocab_size, sizes.draft_vocab_size
        self.has_own_ids = size != sizes.vocab_size or weights.has("d2t")
        self.ids = torch.arange(size if self.has_own_ids else 0, device=weights.source.device)  # the model's ids
        if weights.has("d2t"):  # differences between the ids; without them they are the same
            self.ids += weights.take("d2t", (size,), dtype=torch.int64)
        self.compute_logits: Callable[[torch.Tensor], torch.Tensor] = model.compute_logits
        is_shared = not self.has_own_ids and sizes.hidden_size == sizes.target_hidden_size
        if not is_shared or weights.has("lm_head.weight"):
            rows = take_vocab_share(weights / "lm_head", size, sizes.hidden_size, parallel)
            self.compute_logits = LMHead(rows, size, parallel, batch_invariant=False)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """hidden [R, hidden_size] -> [R, vocab_size]"""
        return self.of_model(self.compute_logits(hidden))

    def of_model(self, logits: torch.Tensor) -> torch.Tensor:
        """logits [R, draft_vocab_size] -> [R, vocab_size], -inf for tokens that the drafter does not know."""
        if not self.has_own_ids:
            return logits
        spread = logits.new_full((logits.shape[0], self.vocab_size), -math.inf)
        return spread.index_copy_(1, self.ids, logits)
