"""Find out what a loaded model's attention calls and recurrent mixers need, and refuse a model that keeps state
elsewhere.

The model runs twice on a few tokens: as `transformers` runs it, and with two sequences in one row and attention
computed by `_dense` below. If the hidden states differ, something but the known arguments affects the result. Mixers
are also tried in parts (`try_in_parts`).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionMaskInterface
from transformers.masking_utils import eager_mask

from proa_engine.layers.cache_layers import CacheLayer, KeyValueLayer
from proa_engine.models.transformers_adapter.attention import (
    IMPLEMENTATION,
    AttentionCall,
    AttentionCalls,
    register,
)
from proa_engine.models.transformers_adapter.recurrent import TOLERANCE, Recurrent, find_mixers, try_in_parts

PROBE = "proa_probe"  # the attention implementation while a model is probed, which has a mask function
LENGTHS = 13, 10  # tokens of the two sequences

Forward = Callable[[Tensor, Tensor], Tensor]  # input_ids, positions [T] -> hidden states [T, hidden_size]


class ProbedMasks:
    """The masks that a model asked for, and their windows."""

    def __init__(self, max_positions: int) -> None:
        self.max_positions = max_positions
        self.windows: list[tuple[Tensor, int | None]] = []

    def __call__(self, *, mask_function: Callable[..., Tensor], **options: Any) -> Tensor:
        mask = eager_mask(mask_function=mask_function, **options | {"allow_is_causal_skip": False})
        self.windows.append((mask, self._window(mask_function)))
        return mask

    def window_of(self, call: AttentionCall) -> int | None:
        for mask, window in self.windows:
            if mask is call.mask:
                return window
        raise ValueError(f"{type(call.module).__name__} changes the attention mask")

    def _window(self, mask_function: Callable[..., Tensor]) -> int | None:
        """The number of tokens that a token attends to by `mask_function`, itself included; None: all before it."""
        counts = []
        for query in (self.max_positions - 1, self.max_positions * 2 // 3):
            keys = torch.arange(self.max_positions)
            zero = torch.tensor(0)
            seen = mask_function(zero, zero, torch.tensor(query), keys).expand(len(keys))
            first = query + 1 - int(seen.sum())
            if not bool(seen[first : query + 1].all()):
                raise ValueError("its attention mask is neither causal nor a sliding window")
            counts.append((query + 1 - first, query + 1))
        (wide, whole), (narrow, smaller) = counts
        if wide == whole and narrow == smaller:
            return None
        if narrow != min(wide, smaller):
            raise ValueError("its attention mask is neither causal nor a sliding window")
        return wide


def probe(
    model: Any,
    decoder: Any,
    calls: AttentionCalls,
    forward: Forward,
    prepare: Callable[[], None],
    vocab_size: int,
    max_positions: int,
) -> tuple[CacheLayer, ...]:
    """Return what each attention call and each mixer of a forward pass keeps. `prepare` may change the model after the
    first runs. Mixers of `decoder` are replaced by `Recurrent`.

    Raises ValueError with the reason for a refusal.
    """
    device = next(model.parameters()).device
    ids = [torch.arange(length, device=device) * 7 % min(vocab_size, 89) + 1 for length in LENGTHS]
    positions = [torch.arange(length, device=device) for length in LENGTHS]
    config = model.config
    _implement(config, "eager")
    expected = torch.cat([forward(*each) for each in zip(ids, positions, strict=True)])
    found = find_mixers(decoder, ids[0], positions[0])
    mixers = [Recurrent(each) for each in found]
    for mixer in mixers:
        replace(decoder, mixer.inner, mixer)
    calls.join(decoder)
    masks, layers = ProbedMasks(max_positions), list[CacheLayer]()
    register(PROBE)
    AttentionMaskInterface.register(PROBE, masks)
    _implement(config, PROBE)

    def read(call: AttentionCall) -> Tensor:
        window = masks.window_of(call)
        layers.append(_layer(call, window))
        return _dense(call, LENGTHS[:1], window)

    def read_mixer(mixer: Recurrent, hidden: Tensor) -> Tensor:
        layers.append(mixer.layer)
        return mixer.alone(hidden)

    calls.run(read, lambda: forward(ids[0], positions[0]), read_mixer)
    if not any(isinstance(layer, KeyValueLayer) for layer in layers):
        raise ValueError("its attention does not go through the interface of transformers")
    register()
    _implement(config, IMPLEMENTATION)
    prepare()
    for mixer, each in zip(mixers, found, strict=True):
        try_in_parts(mixer, each.hidden)
    remaining = iter(layers)

    def attend(call: AttentionCall) -> Tensor:
        layer = next(remaining)
        assert isinstance(layer, KeyValueLayer)
        return _dense(call, LENGTHS, layer.window)

    def mix(mixer: Recurrent, hidden: Tensor) -> Tensor:
        next(remaining)
        return torch.cat([mixer.alone(part) for part in hidden.split(LENGTHS)])

    try:
        packed = calls.run(attend, lambda: forward(torch.cat(ids), torch.cat(positions)), mix)
    except (AttributeError, IndexError, TypeError) as error:
        raise ValueError("it computes with the attention mask itself") from error
    if next(remaining, None) is not None:
        raise ValueError("the number of its attention calls changes")
    check_states(packed, expected)
    return tuple(layers)


def check_states(packed: Tensor, expected: Tensor) -> None:
    """Raise ValueError if the hidden states of packed sequences differ from those of each alone. Both [T, H]"""
    difference = ((packed - expected).float().norm(dim=-1) / expected.float().norm(dim=-1)).max()
    if not float(difference) < TOLERANCE[expected.dtype]:
        raise ValueError("its hidden states depend on more than the tokens' attention")


def replace(model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put `new` in place of `old` wherever a module of `model` holds it."""
    for module in list(model.modules()):
        if module is not new:
            for name, child in module.named_children():
                if child is old:
                    setattr(module, name, new)


def _implement(config: Any, name: str) -> None:
    config._attn_implementation = name


def _layer(call: AttentionCall, window: int | None) -> KeyValueLayer:
    unknown = [name for name, value in call.others.items() if isinstance(value, Tensor) and name != "position_ids"]
    if unknown:
        raise ValueError(f"its attention has the argument {unknown[0]}")
    size = max(call.query.shape[-1], call.value.shape[-1])
    return KeyValueLayer(call.key.shape[1], size + size % 2, window)


def _dense(call: AttentionCall, lengths: tuple[int, ...], window: int | None) -> Tensor:
    """Attention of sequences of `lengths` tokens in one row."""
    num_heads, num_kv_heads = call.query.shape[1], call.key.shape[1]
    key, value = (each.repeat_interleave(num_heads // num_kv_heads, dim=1) for each in (call.key, call.value))
    scores = torch.einsum("qhd,khd->hqk", call.query.float(), key.float()) * call.scale
    if call.soft_cap is not None:
        scores = (scores / call.soft_cap).tanh() * call.soft_cap
    sequence = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).to(scores.device)
    place = torch.arange(sum(lengths), device=scores.device)
    distance = place[:, None] - place
    hidden = (distance < 0) | (sequence[:, None] != sequence)
    if window is not None:
        hidden |= distance >= window
    scores = scores.masked_fill(hidden, -torch.inf)
    if call.sinks is not None:
        sinks = call.sinks.float().view(-1, 1, 1).expand(-1, len(place), 1)
        weights = torch.cat((scores, sinks), dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, value.float()).to(call.value.dtype).contiguous()
