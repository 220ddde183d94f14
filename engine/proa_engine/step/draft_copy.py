"""DraftCopy: the draft tokens of a step's rows under a grammar on the host, while the step's layers run.

The masks of the samples behind draft tokens depend on these.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import Future

import torch
from torch import Tensor

from proa_engine.kernels.sampling.drafts import NONE

_Read = Callable[[], list[list[int]]]


class DraftCopy:
    """The copy of the draft tokens of a step's `rows`. `started` is done once `start` was called."""

    def __init__(self, rows: Sequence[int], slots: int) -> None:
        """`slots`: staged index, of the rows' slots."""
        self.rows = rows
        self.slots = slots
        self.started: Future[_Read] = Future()

    def start(self, draft_ids: Tensor) -> None:
        """Copy `draft_ids` [rows, drafts] int64, which has NONE behind each row's last one. Call it on the stream that
        proposes them."""
        self.started.set_result(_copy(draft_ids))

    def by_row(self) -> dict[int, list[int]]:
        """Return each row's draft tokens, after waiting for the device. Call it when `started` is done."""
        rows = zip(self.rows, self.started.result()(), strict=True)
        return {row: [token_id for token_id in ids if token_id != NONE] for row, ids in rows}


def _copy(tensor: Tensor) -> _Read:
    if tensor.is_cpu:
        values = tensor.tolist()
        return lambda: values
    on_host = torch.empty_like(tensor, device="cpu", pin_memory=True).copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record()

    def read() -> list[list[int]]:
        copied.synchronize()
        values: list[list[int]] = on_host.tolist()
        return values

    return read
