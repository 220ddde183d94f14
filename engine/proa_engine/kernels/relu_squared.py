"""relu(x)², the activation of feed-forward layers without a gate (So et al. 2021, arXiv 2109.08668)."""

import torch
import triton.language as tl

from proa_engine.kernels.launch import INTERPRETED, begin, cdiv, kernel

BLOCK = 1024  # numbers of a program


def relu_squared(x: torch.Tensor) -> torch.Tensor:
    """x [...], contiguous -> the same shape, written over `x`."""
    if x.is_cpu and not INTERPRETED:
        return x.relu_().square_()
    assert x.is_contiguous()
    relu_squared_kernel[(cdiv(x.numel(), BLOCK),)](x, x.numel(), BLOCK=BLOCK, num_warps=4)
    return x


@kernel(do_not_specialize=["size"])
def relu_squared_kernel(
    x_ptr,  # [size]
    size,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    begin(PDL)
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + place, mask=place < size, other=0.0).to(tl.float32)
    x = tl.where(x < 0, 0.0, x)  # NaN stays NaN
    tl.store(x_ptr + place, x * x, mask=place < size)


class ReluSquared:
    """An `ExpertActivation` of experts without a gate: x [rows, N] -> [rows, N]."""

    @property
    def constants(self) -> dict[str, object]:
        """As of `GatedActivation`."""
        return {"ACTIVATION": "relu_squared", "ALPHA": 0.0, "LIMIT": 0.0}

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return relu_squared(x)
