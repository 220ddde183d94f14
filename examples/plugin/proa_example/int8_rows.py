"""Weights of 8-bit integers: `weight` [outputs, inputs] int8, and `weight_scale` [outputs], one for each output.

The product converts the weights to the type of its input, so it saves memory and no time.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.nn.functional import linear

from proa_engine.layers.weights import Experts, LinearMethod, LoadedLinear, Projection


def read(fields: Mapping[str, Any]) -> LinearMethod:
    """`fields`: config.json's `quantization_config`. Raises ValueError for what is not supported."""
    if fields.get("bits", 8) != 8:
        raise ValueError(f"quantization int8_rows with bits {fields['bits']} is not supported; supported: 8")
    return Int8Rows()


class Int8Rows:
    width_unit = 1  # matrices can be cut anywhere

    def load(self, projections: Sequence[Projection], bias: torch.Tensor | None) -> LoadedLinear:
        taken = [_take(each) for each in projections]
        values, scales = (torch.cat(each) for each in zip(*taken, strict=True))
        return LoadedLinear(Int8Linear(values, scales, bias))

    def take_matrix(self, projection: Projection) -> torch.Tensor:
        values, scales = _take(projection)
        return values * scales[:, None]

    def load_experts(self, gate_up: object, down: object, held: object, activation: object) -> Experts:
        raise ValueError("experts quantized by int8_rows are not supported")

    def load_stacked_experts(self, experts: object, activation: object) -> Experts:
        raise ValueError("experts quantized by int8_rows are not supported")


class Int8Linear:
    """Its tensors are attributes, which the engine counts, and moves to the host when it sleeps."""

    def __init__(self, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.values, self.scales, self.bias = values, scales, bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, inputs] -> [T, outputs]"""
        y = linear(x, self.values.to(x.dtype)) * self.scales.to(x.dtype)
        return y if self.bias is None else y + self.bias


def _take(projection: Projection) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a matrix, and the scales of its rows."""
    weights, num_outputs = projection.weights, projection.out_features
    values = weights.take("weight", (num_outputs, projection.in_features), projection.part, torch.int8)
    rows = projection.part if projection.part.dim == 0 else None  # a part of the inputs has the scales of all outputs
    return values, weights.take("weight_scale", (num_outputs,), rows, torch.float32)
