"""Matrices of 4-bit floats as checkpoints store them, for the tests in Triton's interpreter and on a GPU."""

from typing import Literal

import torch

from proa_engine.kernels.experts.moe_fp4 import Fp4Experts
from proa_engine.kernels.fp4 import StoredFp4, pack_fp4
from proa_engine.kernels.products.fp4_linear import Fp4Linear

Kind = Literal["mxfp4", "nvfp4"]
KINDS: tuple[Kind, ...] = ("mxfp4", "nvfp4")


def fp4_case(kind: Kind, *shape: int) -> StoredFp4:
    """`shape`: outputs and inputs, or matrices before them. Every number of 4 bits, and scales that differ."""
    *rows, inputs = shape
    codes = torch.randint(0, 256, (*rows, inputs // 2), dtype=torch.uint8)
    if kind == "mxfp4":
        return StoredFp4(codes, torch.randint(119, 125, (*rows, inputs // 32), dtype=torch.uint8))
    scales = (torch.rand(*rows, inputs // 16) * 400 + 1).to(torch.float8_e4m3fn)
    return StoredFp4(codes, scales, (torch.rand(*rows) * 1e-3 + 1e-4))


def every_scale() -> StoredFp4:
    """An output for each number of e4m3, but for the two that are not numbers, with each number of 4 bits."""
    scales = torch.tensor([bits for bits in range(256) if bits & 127 != 127], dtype=torch.uint8)
    codes = torch.arange(16, dtype=torch.uint8).view(8, 2)
    packed = (codes[:, 0] | codes[:, 1] << 4).expand(len(scales), 8)
    factors = torch.rand(len(scales)) * 1e-3 + 1e-4
    return StoredFp4(packed, scales.view(torch.float8_e4m3fn)[:, None], factors)


def experts_of(stored: StoredFp4, bias: torch.Tensor | None) -> tuple[Fp4Experts, list[Fp4Linear]]:
    """[experts, outputs, inputs] for the GPU's kernels, and as the reference."""
    biases = [None] * len(stored.codes) if bias is None else bias
    products = [Fp4Linear(*each) for each in zip(stored.unbind(), biases, strict=True)]
    return Fp4Experts(pack_fp4(stored, bias)), products


def on_device(stored: StoredFp4, device: str) -> StoredFp4:
    factors = None if stored.factors is None else stored.factors.to(device)
    return StoredFp4(stored.codes.to(device), stored.scales.to(device), factors)
