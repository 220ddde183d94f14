"""Matrices of 4-bit floats as checkpoints store them, for the tests in Triton's interpreter and on a GPU."""

from typing import Literal

import torch

from proa_engine.kernels.fp4 import StoredFp4

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
