"""The weights of a short convolution, and what its kernels share: the inputs before a token, and the sum over them.

The kernels are written for three inputs before a token, `third`, `second` and `latest`. With two of them, `third` and
its weight are zeros.
"""

from dataclasses import dataclass

import torch
import triton
import triton.language as tl


@dataclass(frozen=True, eq=False)  # without slots: `parameters()` of a model finds tensors by `vars`
class ConvWeights:
    weight: torch.Tensor  # [C, kernel size], contiguous; the token's own is the last one
    bias: torch.Tensor | None = None  # [C]
    silu: bool = True  # of the sum

    @property
    def num_channels(self) -> int:
        return self.weight.shape[0]

    @property
    def num_before(self) -> int:
        """Inputs before a token that it reads."""
        return self.weight.shape[1] - 1

    @property
    def constants(self) -> dict[str, object]:
        """Of the kernels."""
        return {"BEFORE": self.num_before, "HAS_BIAS": self.bias is not None, "SILU": self.silu}


@triton.jit
def load_before(place, stride, mask, BEFORE: tl.constexpr):
    """The inputs before a token, `third`, `second` and `latest`, of which the first one lies at `place`."""
    third = tl.load(place, mask=mask & (BEFORE == 3), other=0.0)
    second = tl.load(place + (BEFORE - 2) * stride, mask=mask, other=0.0)
    latest = tl.load(place + (BEFORE - 1) * stride, mask=mask, other=0.0)
    return third, second, latest


@triton.jit
def store_before(place, third, second, latest, mask, BEFORE: tl.constexpr):
    if BEFORE == 3:
        tl.store(place, third, mask=mask)
    tl.store(place + (BEFORE - 2), second, mask=mask)
    tl.store(place + (BEFORE - 1), latest, mask=mask)


@triton.jit
def load_weights(weight_ptr, bias_ptr, channel, mask, BEFORE: tl.constexpr, HAS_BIAS: tl.constexpr):
    """In float32: the weights of `third`, `second` and `latest`, that of the token, and the bias."""
    place = weight_ptr + channel * (BEFORE + 1)
    third, second, latest = load_before(place, 1, mask, BEFORE)
    own = tl.load(place + BEFORE, mask=mask, other=0.0)
    bias = tl.zeros_like(third)
    if HAS_BIAS:
        bias = tl.load(bias_ptr + channel, mask=mask, other=0.0)
    return (
        third.to(tl.float32),
        second.to(tl.float32),
        latest.to(tl.float32),
        own.to(tl.float32),
        bias.to(tl.float32),
    )


@triton.jit
def convolve(
    own, latest, second, third, own_weight, latest_weight, second_weight, third_weight, bias, SILU: tl.constexpr
):
    """The output for the input `own` behind others, all in float32. One function, so that a token that is computed
    again has the same bits."""
    total = own * own_weight + latest * latest_weight + second * second_weight + third * third_weight + bias
    if SILU:
        total = total / (1.0 + tl.exp(-total))
    return total
