"""Matrix products by a weight on a CPU: y = x @ weight.T + bias, each row's bits independent of the others.

By oneDNN with a weight packed once: measured on AVX2 (Zen 3, one to sixteen threads, 1 to 4096 rows), its rows never
depend on their number, and one row costs 0.4 of what it costs `F.linear` on two threads. Where oneDNN cannot take the
type, `F.linear` with rows padded to a multiple of 8: its rows agree only from there on.

A oneDNN call has 20 us of its own, which is most of a small weight's time. FBGEMM's weighted sum of rows is the same
product for one row, in a quarter to a half of the time; both add in the order of the inputs, each with one fused
multiply-add, as long as oneDNN does not cut the sum (measured: 1024 inputs). Whether their bits agree here is tried
when a weight is loaded.
"""

import torch
import torch.nn.functional as F

ROW_MULTIPLE = 8
MAX_SUM_INPUTS = 1024
MAX_SUM_NUMBERS = 1 << 20  # of a weight that is held a second time, transposed
NUM_TRIED_ROWS = 4


class Linear:
    """A weight [out_features, in_features] and an optional bias, in the form that the device multiplies fastest."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.shape = weight.shape
        self.bias = bias
        self.packed = can_pack(weight)
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None) if self.packed else weight
        self.one_row = self._one_row(weight) if self.packed and bias is None else None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        if self.one_row is not None and x.shape[0] == 1:
            return self.one_row(x)
        if self.packed:
            # The overload by its name, for looking it up costs as much as a small addition.
            y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
            return y
        return linear_reference(x, self.weight, self.bias)

    def _one_row(self, weight: torch.Tensor) -> "OneRow | None":
        """The quicker way for one row, if it is one and gives the bits of the other."""
        if weight.shape[1] > MAX_SUM_INPUTS or weight.numel() > MAX_SUM_NUMBERS:
            return None
        one_row = OneRow(weight)
        tried = torch.randn(NUM_TRIED_ROWS, weight.shape[1], generator=torch.Generator().manual_seed(0))
        expected = torch.ops.mkldnn._linear_pointwise.default(tried, self.weight, None, "none", [], "")
        return one_row if torch.equal(torch.cat([one_row(row) for row in tried.split(1)]), expected) else None

    @property
    def num_bytes(self) -> int:
        bias_bytes = 0 if self.bias is None else self.bias.numel() * self.bias.element_size()
        return self.shape.numel() * self.weight.element_size() + bias_bytes


class OneRow:
    """x @ weight.T for one row x, as the sum of the weight's columns, each times its input."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.columns = weight.t().contiguous()
        self.order = torch.arange(weight.shape[1])
        self.start = torch.zeros(1, dtype=torch.int64)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [1, in_features] -> [1, out_features]"""
        return weighted_sums(self.columns, self.order, self.start, x.reshape(-1))


def weighted_sums(
    rows: torch.Tensor, indices: torch.Tensor, starts: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """[N, D] -> [len(starts), D]: sums of the rows at `indices`, each times its weight; one from each start on.

    What `embedding_bag` calls where there is no gradient, without its own third of the time.
    """
    sums, *_ = torch._embedding_bag_forward_only(rows, indices, starts, per_sample_weights=weights)
    return sums


def can_pack(weight: torch.Tensor) -> bool:
    return weight.device.type == "cpu" and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def linear_reference(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    rows = x.shape[0]
    padding = -rows % ROW_MULTIPLE
    return F.linear(F.pad(x, (0, 0, 0, padding)), weight, bias)[:rows] if padding else F.linear(x, weight, bias)
