"""Encoders of `transformers` for pooled requests: bidirectional attention, whole prompts, no KV cache."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from proa_engine.layers.attention_metadata import AttentionMetadata, TokenType
from proa_engine.layers.cache_layers import CacheLayer, LayerCache
from proa_engine.layers.linear import Unquantized
from proa_engine.layers.parallel import ParallelContext
from proa_engine.layers.weights import Weights
from proa_engine.models.config import ModelConfig
from proa_engine.models.transformers_adapter import fields as adapter_fields
from proa_engine.models.transformers_adapter.attention import IMPLEMENTATION, AttentionCall, AttentionCalls, register
from proa_engine.models.transformers_adapter.load_weights import TypedSource, load_weights
from proa_engine.models.transformers_adapter.model import GivenStates, unique_tensors
from proa_engine.models.transformers_adapter.probe import LENGTHS, check_states
from proa_engine.models.weight_sources import CheckpointWeights

OFFSET_TYPES = ("camembert", "roberta", "xlm-roberta")  # positions begin behind that of padding


def encoder_fields(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that `ModelConfig` reads, see `standard_fields`."""
    standard = adapter_fields.standard_fields(fields)
    standard["max_position_embeddings"] -= position_offset(fields)
    return standard


def position_offset(fields: Mapping[str, Any]) -> int:
    """The position of a prompt's first token."""
    if fields.get("model_type") not in OFFSET_TYPES:
        return 0
    return int(adapter_fields.read_config(fields).pad_token_id) + 1


class TransformersEncoder:
    """As a `CausalLM`, but without logits and caches. The constructor loads all weights and tries the model: it raises
    ValueError with the reason if the model cannot be served."""

    defaults: Mapping[str, Any] = {}
    names: tuple[tuple[str, str], ...] = ()
    read_options = staticmethod(adapter_fields.read_options)

    def __init__(self, config: ModelConfig, weights: Weights, parallel: ParallelContext) -> None:
        options = config.decoder
        assert isinstance(options, adapter_fields.AdaptedOptions)
        if not isinstance(config.linear_method, Unquantized) or config.batch_invariant or parallel.world_size > 1:
            raise ValueError(
                f"{config.architecture} is run by transformers, where quantization, LoRA, batch_invariant on a GPU and "
                "tensor_parallel_size are not supported for encoders"
            )
        source = weights.source
        assert isinstance(source, TypedSource)
        self._model: Any = adapter_fields.build_on_meta(options.fields, source.dtype)
        base = self._model.base_model
        if not config.pooling.labels and not _has_pooler(source):  # embeddings do not need it
            base.pooler = None
        load_weights(self._model, source, others=config.pooling.head_tensors)
        self._encoder: Any = base
        self._offset = position_offset(options.fields)
        self._has_types = int(options.fields.get("type_vocab_size") or 0) > 1
        self._calls = AttentionCalls(self._model)
        self._given: GivenStates | None = None
        if config.pooling.labels:
            # The rest of the model computes labels of hidden states that it gets from here.
            self._given = GivenStates(getattr(base, "pooler", None), base)
            setattr(self._model, self._model.base_model_prefix, self._given)
        self._try(config)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, caches: Sequence[LayerCache], metadata: AttentionMetadata
    ) -> Tensor:
        starts = metadata.query_start_loc.tolist()
        return self._hidden(input_ids, positions, metadata.token_types, starts)

    def classify(self, vectors: Tensor) -> Tensor:
        """Pooled hidden states [n, hidden_size] -> logits of the labels [n, labels] float32."""
        assert self._given is not None
        self._given.hidden = vectors.to(next(self._model.parameters()).dtype)[:, None]
        ids = torch.zeros(len(vectors), 1, dtype=torch.int64, device=vectors.device)
        logits: Tensor = self._model(ids).logits
        return logits.float()

    def compute_logits(self, hidden: Tensor) -> Tensor:
        raise AssertionError("an encoder has no logits")

    def cache_layers(self) -> tuple[CacheLayer, ...]:
        return ()

    def parameters(self) -> Iterator[Tensor]:
        return unique_tensors(self._encoder, self._model)

    def _hidden(self, input_ids: Tensor, positions: Tensor, token_types: Tensor | None, starts: list[int]) -> Tensor:
        inputs = {"input_ids": input_ids[None], "position_ids": positions[None] + self._offset}
        num_keys = [end - start for start, end in pairwise(starts)]
        if token_types is not None:
            if self._has_types:
                inputs["token_type_ids"] = (token_types == TokenType.SECOND).long()[None]
            is_key = token_types != TokenType.UNATTENDED
            num_keys = [int(is_key[start:end].sum()) for start, end in pairwise(starts)]
        output = self._calls.run(_attend(starts, num_keys), lambda: self._encoder(**inputs))
        hidden: Tensor = output[0][0]
        return hidden

    @torch.inference_mode()
    def _try(self, config: ModelConfig) -> None:
        """Compare two sequences in one row with each alone, as `transformers` runs it."""
        device = next(self._encoder.parameters()).device
        ids = [torch.arange(length, device=device) * 7 % min(config.vocab_size, 89) + 2 for length in LENGTHS]
        expected = torch.cat([self._encoder(each[None])[0][0] for each in ids])
        register()
        self._encoder.config._attn_implementation = IMPLEMENTATION
        positions = torch.cat([torch.arange(length, device=device) for length in LENGTHS])
        packed = self._hidden(torch.cat(ids), positions, None, [0, LENGTHS[0], sum(LENGTHS)])
        if device.type != "meta":
            try:
                check_states(packed, expected)
            except ValueError as error:
                raise ValueError(f"{config.architecture} cannot be run through transformers: {error}") from error


def _has_pooler(source: TypedSource) -> bool:
    return isinstance(source, CheckpointWeights) and any("pooler." in name for name in source.take_names())


def _attend(starts: list[int], num_keys: list[int]) -> Callable[[AttentionCall], Tensor]:
    """Attention of all tokens of a sequence to the first num_keys[r] of them; sequence `r` has the tokens starts[r] …
    starts[r + 1]."""

    def attend(call: AttentionCall) -> Tensor:
        parts = []
        for (start, end), count in zip(pairwise(starts), num_keys, strict=True):
            query = call.query[start:end].transpose(0, 1)[None]
            key, value = (each[start : start + count].transpose(0, 1)[None] for each in (call.key, call.value))
            mask = _window(end - start, count, call.others.get("sliding_window"), call.query.device)
            out = F.scaled_dot_product_attention(
                query, key, value, attn_mask=mask, scale=call.scale, enable_gqa=key.shape[1] < query.shape[1]
            )
            parts.append(out[0].transpose(0, 1))
        return torch.cat(parts)

    return attend


def _window(length: int, num_keys: int, window: int | None, device: torch.device) -> Tensor | None:
    """Which tokens see which keys, [length, num_keys]: those less than `window` apart. None: all."""
    if window is None or window >= length:
        return None
    place = torch.arange(length, device=device)
    return (place[:, None] - place[:num_keys]).abs() < window
