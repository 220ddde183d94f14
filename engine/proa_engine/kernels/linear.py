"""Matrix products by a weight that does not change: y = x @ weight.T + bias, each row's bits independent of the others.

cuBLAS on a GPU. On a CPU, oneDNN with a weight packed once: measured on AVX2 (Zen 3, one to sixteen threads, 1 to 4096
rows), its rows never depend on their number, and one row costs 0.4 of what it costs `F.linear` on two threads. Where
oneDNN cannot take the type, `F.linear` with rows padded to a multiple of 8: its rows agree only from there on.
"""

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 8


class Linear:
    """A weight [out_features, in_features] and an optional bias, in the form that the device multiplies fastest."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = weight.shape
        self.bias = bias
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        if self.packed:
            # The overload by its name, for looking it up costs as much as a small addition.
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
            return y
        return F.linear(x, self.weight, self.bias) if x.is_cuda else linear_reference(x, self.weight, self.bias)

    @property
    def num_bytes(self) -> int:
        bias_bytes = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.shape.numel() * self.weight.element_size() + bias_bytes


def can_pack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.shape[0]
    padding = -rows % ROW_MULTIPLE
    return F.linear(F.pad(x, (0, 0, 0, padding)), weight, bias)[:rows] if padding else F.linear(x, weight, bias)
