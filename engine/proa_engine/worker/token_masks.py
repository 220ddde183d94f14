"""TokenMasks: the masks of a step's constrained rows, on the device and by row of the step's logits."""

from dataclasses import dataclass

import torch
from torch import Tensor

from proa_engine.core.grammar import GrammarMasks
from proa_engine.worker.staging import PackedArrays, Staging
from proa_engine.worker.step_inputs import SamplingInputs


@dataclass(frozen=True, slots=True)
class TokenMasks:
    """As `kernels.token_bitmask` takes them."""

    rows: Tensor  # [masked rows] int64: rows of logits
    bits: Tensor  # [masked rows, words] int32


def ship_masks(masks: GrammarMasks, sampling: SamplingInputs, staging: Staging) -> TokenMasks:
    """Copy a step's masks to its device, without waiting for the copy if their memory is pinned.

    Every masked row must sample exactly one token; other rows may sample several, which verify drafts.
    """
    rows = sampling.rows.searchsorted(masks.rows)
    assert sampling.rows[rows].tolist() == masks.rows, "a masked row samples no token"
    (on_device,) = staging.ship(PackedArrays(rows, [rows.size]))
    bits = torch.frombuffer(masks.bits, dtype=torch.int32).view(rows.size, -1)
    return TokenMasks(on_device, bits.to(on_device.device, non_blocking=True))
