"""Roofline lower bound of a step's time on a card, part by part.

A part takes the longer of its bytes over the bandwidth and its operations over the rate; the floor is their sum. Each
weight and each cached key and value is counted once.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

MXFP4_BYTES = 4.25 / 8  # of a weight of 4 bits, with its share of the scale of 32
NVFP4_BYTES = 4.5 / 8  # likewise, with the scale of 16
INT4_BYTES = 4.25 / 8  # likewise, with the scale and zero of 128


@dataclass(frozen=True, slots=True)
class Card:
    """Measured rates."""

    bytes_per_second: float  # read plus written
    flops_per_second: float  # of products of bfloat16 matrices


@dataclass(frozen=True, slots=True)
class Part:
    """A part of the model, all layers together."""

    name: str
    num_bytes: float
    flops: float
    speedup: float = 1.0  # of the operations, relative to bfloat16

    def seconds(self, card: Card) -> float:
        return max(self.num_bytes / card.bytes_per_second, self.flops / self.speedup / card.flops_per_second)


@dataclass(frozen=True, slots=True)
class Step:
    """Prefills, or decodes after a context."""

    sequences: int
    new_tokens: int  # of each
    context: int  # of each, before the new ones

    @property
    def rows(self) -> int:
        return self.sequences * self.new_tokens

    @classmethod
    def of_workload(cls, workload: str, context: int) -> "Step":
        """Parse `decode-B` (after `context` tokens) or `prefill-NxL`."""
        kind, _, size = workload.partition("-")
        if kind == "decode":
            return cls(int(size), 1, context)
        count, length = map(int, size.split("x"))
        return cls(count, length, 0)


def parts(config: Mapping[str, Any], step: Step, *, fp8: bool) -> Iterator[Part]:
    """Parts of a model with this config.json: unquantized, or 8-bit integers, or 4-bit floats, or 4-bit integers in
    groups of 128. `fp8`: the layers' matrices have 8 bits, the embedding has 16."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    method = (config.get("quantization_config") or {}).get("quant_method")
    has_8_bits = fp8 or method == "compressed-tensors"
    itemsize, speedup = (
        (1.0, 2.0) if has_8_bits else ({"awq": INT4_BYTES, "modelopt": NVFP4_BYTES}.get(str(method), 2.0), 1.0)
    )

    def product(name: str, parameters: float, used: float | None = None) -> Part:
        """`used`: parameters that one row is multiplied with, if not all that are read."""
        flops = 2 * step.rows * (parameters if used is None else used)
        return Part(name, layers * parameters * itemsize, layers * flops, speedup)

    yield product("attention's products", hidden * head_dim * 2 * (heads + kv_heads))
    if num_experts := config.get("num_experts") or config.get("num_local_experts"):
        chosen = config["num_experts_per_tok"]
        expert = 3 * hidden * (config.get("moe_intermediate_size") or config["intermediate_size"])
        met = num_experts * (1 - (1 - chosen / num_experts) ** step.rows)  # expected number, of randomly routed rows
        expert_itemsize = MXFP4_BYTES if method == "mxfp4" else itemsize
        yield Part(
            "experts", layers * met * expert * expert_itemsize, layers * 2 * step.rows * chosen * expert, speedup
        )
    else:
        yield product("MLP", 3 * hidden * config["intermediate_size"])
    keys = pairs = 0.0  # read before the step; of queries and the keys that they attend to
    for kind in config.get("layer_types") or ["full_attention"] * layers:
        most = config["sliding_window"] if kind == "sliding_attention" else math.inf
        keys += step.sequences * min(step.context, most)
        pairs += step.rows * min(step.context + (step.new_tokens + 1) / 2, most)
    yield Part("attention", keys * 4 * kv_heads * head_dim, pairs * 4 * heads * head_dim)
    head = hidden * config["vocab_size"]
    yield Part("logits", 2 * head, 2 * step.sequences * head)


def floor_seconds(config: Mapping[str, Any], step: Step, card: Card, *, fp8: bool) -> float:
    return sum(part.seconds(card) for part in parts(config, step, fp8=fp8))
