"""The attention function that models of `transformers` call: paged attention over Proa's caches.

A model calls its attention functions and its recurrent mixers in the same order in every forward pass, so the i-th call
uses the i-th cache.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface

from proa_engine.kernels.attention.paged_attention import paged_attention
from proa_engine.kernels.attention.store_kv import store_kv
from proa_engine.layers.attention_metadata import AttentionStep
from proa_engine.layers.cache_layers import CacheLayer, KeyValueLayer, LayerCache
from proa_engine.models.transformers_adapter.recurrent import Recurrent, mix

IMPLEMENTATION = "proa"  # in a configuration's `_attn_implementation`


@dataclass(slots=True)  # a frozen one takes four times as long to make
class AttentionCall:
    """One call of the attention function, without the batch dimension."""

    module: nn.Module
    query: Tensor  # [T, heads, D]
    key: Tensor  # [T, kv_heads, D]
    value: Tensor  # [T, kv_heads, V]
    mask: Tensor | None
    scale: float
    soft_cap: float | None
    sinks: Tensor | None  # [heads]
    others: Mapping[str, Any]  # arguments that have no meaning here


Attend = Callable[[AttentionCall], Tensor]  # -> [T, heads, V]
Mix = Callable[[Recurrent, Tensor], Tensor]  # [T, H] -> [T, H]


def _no_step(call: AttentionCall) -> Tensor:
    raise AssertionError(f"{type(call.module).__name__} calls attention outside of a step")


def _no_mixer(mixer: Recurrent, hidden: Tensor) -> Tensor:
    raise AssertionError(f"{type(mixer.inner).__name__} is called outside of a step")


class AttentionCalls:
    """Where the attention calls of one model and those of its mixers go; every module of the model holds it as
    `proa_calls`."""

    def __init__(self, model: nn.Module) -> None:
        self.attend: Attend = _no_step
        self.mix: Mix = _no_mixer
        self.join(model)

    def join(self, model: nn.Module) -> None:
        for module in model.modules():
            module.__dict__["proa_calls"] = self

    def run(self, attend: Attend, forward: Callable[[], Any], mix: Mix = _no_mixer) -> Any:
        """Return forward(), whose attention calls `attend` computes, and those of mixers `mix`."""
        self.attend, self.mix = attend, mix
        try:
            return forward()
        finally:
            self.attend, self.mix = _no_step, _no_mixer


def register(name: str = IMPLEMENTATION) -> None:
    """Make `name` known to `transformers`. It has no mask function, so models that use it build no masks."""
    AttentionInterface.register(name, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """query [1, heads, T, D], key [1, kv_heads, T, D], value [1, kv_heads, T, V] -> [1, T, heads, V]"""
    call = AttentionCall(
        module=module,
        query=query[0].transpose(0, 1),
        key=key[0].transpose(0, 1),
        value=value[0].transpose(0, 1),
        mask=attention_mask,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        soft_cap=softcap,
        sinks=s_aux,
        others=others,
    )
    return module.__dict__["proa_calls"].attend(call)[None], None


class PagedAttend:
    """Computes a step's attention calls, and those of mixers, over the caches of `layers`."""

    def __init__(self, layers: Sequence[CacheLayer], caches: Sequence[LayerCache], step: AttentionStep) -> None:
        self.remaining = iter(zip(layers, caches, strict=True))
        self.step = step

    def __call__(self, call: AttentionCall) -> Tensor:
        layer, cache = next(self.remaining)
        assert isinstance(layer, KeyValueLayer)
        metadata = self.step.metadata
        table = metadata.tables[cache.table]
        size, width = layer.head_dim, call.value.shape[-1]
        query, key, value = (_widen(each, size).contiguous() for each in (call.query, call.key, call.value))
        key_cache, value_cache = cache.tensors
        store_kv(key, value, key_cache, value_cache, table.slot_mapping, self.step.cache_rows(cache))
        out = paged_attention(
            query,
            key_cache,
            value_cache,
            metadata.query_start_loc,
            metadata.seq_lens,
            table.block_table,
            self.step.plan(cache, layer.window),
            num_decodes=metadata.num_decodes,
            scale=call.scale,
            window=layer.window,
            sinks=call.sinks,
            soft_cap=call.soft_cap,
        )
        return out[..., :width].contiguous()

    def mix(self, mixer: Recurrent, hidden: Tensor) -> Tensor:
        _, cache = next(self.remaining)
        return mix(mixer, hidden, cache, self.step)


def _widen(heads: Tensor, size: int) -> Tensor:
    """heads [T, n, D] -> [T, n, size], filled up with zeros, which change no product."""
    return F.pad(heads, (0, size - heads.shape[-1])) if heads.shape[-1] < size else heads
