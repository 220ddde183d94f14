"""CPU matrix products y = x @ weight.T + bias in which a row's bits do not depend on the number of rows.

float32 weights are packed once and multiplied by oneDNN; other types, and builds without oneDNN, use `F.linear`.
float32 weights whose numbers float16 can hold, such as those of 16-bit checkpoints, are held in float16 if they are
large and the processor has AVX-512, and FBGEMM multiplies them in float32. A weight of 8192 x 2048 then takes half the
memory, and 0.45 times the time with one row, 0.94 with 16, 1.13 with 300 (one thread). With AVX2, the order of FBGEMM's
sums depends on the number of rows.

These libraries choose the order of the sum over the inputs by shape, instruction set and number of threads. With
oneDNN 3.12, a single row of more than 1024 inputs (AVX-512) or of more than some hundred (SSE4.1) is summed in another
order than a row of a batch; two rows and more agree with each other. So `find_row_policy` tries, for each shape of
weight and on this processor, a list of `RowPolicy`s, fastest first, and takes the first one that holds.

A call of oneDNN costs about 20 us before it multiplies anything, more than the product of one row and a small weight.
For one row, FBGEMM's weighted sum of the weight's columns (`OneRow`) is used where it gives the same bits: both add in
the order of the inputs with fused multiply-add, as long as oneDNN does not cut the sum (at 512 inputs with AVX-512).
"""

import functools
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

ONE_ROW_MAX_INPUTS = 1024
ONE_ROW_MAX_NUMEL = 1 << 20  # the columns are a second copy of the weight
PROBED_ROWS = (1, 2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 64, 100, 300)
THREADED_PROBED_ROWS = (1, 2, 8, 33, 300)  # fewer, because a product's first call with several threads takes longer
PROBED_SINGLE_ROWS = 16
MAX_PROBED_OUTPUTS = 4096
MAX_PROBED_PRODUCTS = 1 << 30  # multiplications in one probed call, but never fewer than MIN_PROBED_ROWS rows
MIN_PROBED_ROWS = 33
SMALL_TERM = 2.0**-14
HALF_STEP = 2.0**-25  # half of the least step between float16s
HALF_MIN_NUMEL = 1 << 18  # smaller weights, in the caches, are multiplied faster in float32

_log = logging.getLogger(__name__)

Product = Callable[[torch.Tensor], torch.Tensor]  # [rows, in_features] -> [rows, out_features]


@dataclass(frozen=True, slots=True)
class RowPolicy:
    """How many rows each call of a product gets. Missing rows are filled with zeros."""

    min_rows: int = 1
    tile_rows: int | None = None  # set: every call gets exactly this many rows

    def multiply(self, product: Product, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        rows = x.shape[0]
        if self.tile_rows is None:
            return product(x) if rows >= self.min_rows else product(_fill(x, self.min_rows))[:rows]
        padded = _fill(x, rows + -rows % self.tile_rows)
        return torch.cat([product(tile) for tile in padded.split(self.tile_rows)])[:rows]


# Fastest first. The last one holds wherever a call's rows do not depend on their position and on the thread count.
# 2 rows would be enough on AVX-512, but take longer than 4: oneDNN reads a weight that is not in the caches (the usual
# case in a model of many layers) in 1.5 ms for 2 rows, 1.0 ms for 4 (2048 x 2048, one thread).
ROW_POLICIES = (RowPolicy(), RowPolicy(min_rows=4), RowPolicy(min_rows=8), RowPolicy(tile_rows=16))


@dataclass(frozen=True, slots=True)
class Verdict:
    """What `find_row_policy` found for a shape of weight."""

    policy: RowPolicy
    holds: bool = True  # False: no policy makes rows independent of their number
    one_row: bool = False  # `OneRow` gives the policy's bits


class Linear:
    """A weight [out_features, in_features] with an optional bias [out_features], packed for fast products on a CPU.

    The bits of an output row depend only on the input row and the weight: not on the number and values of other rows
    nor on whether torch runs 1 thread or as many as when the weight was loaded. Where this cannot be had on a
    processor, a warning is logged once when the first such weight is loaded.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None, verdict: Verdict | None = None) -> None:
        """`verdict` None: as from `find_row_policy`, which needs the process for itself. With a verdict, the weight is
        held in its own type."""
        self.shape = weight.shape
        self.policy, self.one_row = RowPolicy(), None
        half = False
        if weight.is_cpu:
            shape = *weight.shape, bias is not None, weight.dtype, torch.get_num_threads()
            if verdict is None:
                half = fits_half(weight) and find_row_policy(*shape, True) == Verdict(RowPolicy())
                verdict = Verdict(RowPolicy()) if half else find_row_policy(*shape)
            self.policy = verdict.policy
            self.one_row = OneRow(weight) if verdict.one_row else None
        self.product = make_product(weight, bias, half)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        if self.one_row is not None and x.shape[0] == 1:
            return self.one_row(x)
        return self.policy.multiply(self.product, x)


class OneRow:
    """One row times a weight [out_features, in_features], as a weighted sum of the weight's columns."""

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
    """Sum weights[i] * rows[indices[i]] over each segment of i, [num_segments, D].

    rows [N, D], indices and weights [M], starts [num_segments]: where each segment begins. Calls what
    `F.embedding_bag` calls without gradients, in two thirds of its time.
    """
    sums, *_ = torch._embedding_bag_forward_only(rows, indices, starts, per_sample_weights=weights)
    return sums


def can_pack(weight: torch.Tensor) -> bool:
    return weight.is_cpu and weight.dtype == torch.float32 and torch.backends.mkldnn.is_available()


def fits_half(weight: torch.Tensor) -> bool:
    """Whether a `HalfProduct` of a float32 weight on a CPU pays and is equal: it is large, and each of its numbers is a
    float16, or, below 2^-14, less than half a step away from one."""
    if weight.dtype != torch.float32 or weight.numel() < HALF_MIN_NUMEL or not has_half_products():
        return False
    return all(bool(((rows - rows.half()).abs_() <= HALF_STEP).all()) for rows in weight.split(PROBED_ROWS[-1]))


def has_half_products() -> bool:
    """Whether torch's build has FBGEMM, and the processor the instructions with which it sums rows in one order."""
    has_fbgemm = torch.backends.quantized.engine in ("x86", "fbgemm")
    return has_fbgemm and torch.backends.cpu.get_cpu_capability() == "AVX512"


def make_product(weight: torch.Tensor, bias: torch.Tensor | None, half: bool) -> Product:
    """The fastest product by `weight` [out_features, in_features] that the build of torch has, its bits unchecked.

    `half`: whether the weight is held in float16, see `fits_half`.
    """
    if half:
        return HalfProduct(weight, bias)
    return PackedProduct(weight, bias) if can_pack(weight) else PlainProduct(weight, bias)


class HalfProduct:
    """FBGEMM's product in float32 by a weight [out_features, in_features] that it holds in float16."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.packed = torch.ops.quantized.linear_prepack_fp16(weight, bias)
        # `packed` is no tensor, and a model's bytes are counted by tensors: this one has its size, but no memory.
        self.counted = torch.zeros((), dtype=torch.float16).expand(weight.shape)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        y: torch.Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, self.packed)
        return y


class PackedProduct:
    """oneDNN's product by a weight [out_features, in_features] in the layout that oneDNN chose for it."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        # Naming the overload saves its lookup, which costs as much as a small addition.
        y: torch.Tensor = torch.ops.mkldnn._linear_pointwise.default(x, self.weight, self.bias, "none", [], "")
        return y


class PlainProduct:
    """torch's product by a weight [out_features, in_features]."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, in_features] -> [rows, out_features]"""
        return F.linear(x, self.weight, self.bias)


@functools.cache
def find_row_policy(
    out_features: int, in_features: int, has_bias: bool, dtype: torch.dtype, num_threads: int, half: bool = False
) -> Verdict:
    """Try the row policies on the numbers of `_probe`. Return the first that holds with 1 and `num_threads` threads.
    `half`: as for `make_product`; then only the first, since in float32 fewer rows are filled in.

    A weight of more than `MAX_PROBED_OUTPUTS` outputs is judged by one of that many: a library that has more outputs to
    share among its threads has less reason to cut the sum over the inputs.
    """
    out_features = min(out_features, MAX_PROBED_OUTPUTS)
    max_rows = max(MAX_PROBED_PRODUCTS // (out_features * in_features), MIN_PROBED_ROWS)
    threads = sorted({1, num_threads})
    counts = {
        t: [rows for rows in (PROBED_ROWS if t == 1 else THREADED_PROBED_ROWS) if rows <= max_rows] for t in threads
    }
    x, weight, bias = _probe(counts[1][-1], in_features, out_features, dtype)
    product = make_product(weight, bias if has_bias else None, half)
    try:
        for policy in ROW_POLICIES[:1] if half else ROW_POLICIES:
            multiply = functools.partial(policy.multiply, product)
            whole = multiply(x)
            if all(_rows_agree(multiply, x, whole, counts[t], t) for t in threads):
                one_row = not has_bias and not half and _one_row_agrees(weight, x, whole, threads)
                return Verdict(policy, one_row=one_row)
    finally:
        torch.set_num_threads(num_threads)
    if not half:
        _warn_once()
    return Verdict(RowPolicy(), holds=False)


def _probe(
    rows: int, in_features: int, out_features: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Random x [rows, in_features], weight [out_features, in_features] and bias [out_features].

    All terms of a sum cancel in pairs except one or two small ones. So the order of the sum shows in results that are
    rounded to 16 bits: with terms of equal size it shows in one of a thousand.
    """
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(rows, in_features, generator=generator)
    weight = torch.randn(out_features, in_features, generator=generator)
    bias = torch.randn(out_features, generator=generator) * SMALL_TERM
    order = torch.randperm(in_features, generator=generator)
    num_pairs = (in_features - 1) // 2
    first, second, small = order.split([num_pairs, num_pairs, in_features - 2 * num_pairs])
    x[:, second], weight[:, second] = -x[:, first], weight[:, first]
    x[:, small] *= SMALL_TERM
    return x.to(dtype), weight.to(dtype), bias.to(dtype)


def _rows_agree(multiply: Product, x: torch.Tensor, whole: torch.Tensor, counts: list[int], num_threads: int) -> bool:
    """Whether products of the last `counts` rows of x [rows, in_features] have the bits of `whole`."""
    torch.set_num_threads(num_threads)
    return all(torch.equal(multiply(x[-count:]), whole[-count:]) for count in counts)


def _one_row_agrees(weight: torch.Tensor, x: torch.Tensor, whole: torch.Tensor, threads: list[int]) -> bool:
    """Whether `OneRow` serves products by `weight` [out_features, in_features] and has the bits of `whole`."""
    if not can_pack(weight) or weight.shape[1] > ONE_ROW_MAX_INPUTS or weight.numel() > ONE_ROW_MAX_NUMEL:
        return False
    one_row = OneRow(weight)

    def multiply(rows: torch.Tensor) -> torch.Tensor:
        return torch.cat([one_row(row) for row in rows.split(1)])

    return all(_rows_agree(multiply, x, whole, [PROBED_SINGLE_ROWS], count) for count in threads)


@functools.cache
def _warn_once() -> None:
    _log.warning(
        "results depend on the batch on this processor: its matrix products give a row other bits alone than beside "
        "others, so a request may get other tokens alone, batched or resumed where two tokens are equally likely"
    )


def _fill(x: torch.Tensor, num_rows: int) -> torch.Tensor:
    """x [rows, in_features] -> [num_rows, in_features]"""
    return torch.cat((x, x.new_zeros(num_rows - x.shape[0], x.shape[1])))
