"""Router of a mixture of experts: the norm of its input, its product and the choice of experts.

For 3 rows and more, up to 256, all three are one launch on a GPU (`norm_and_route`). A program has 8 rows and some
experts, and holds both whole: it reads the experts' weights before the previous kernel has ended, computes the rows'
norm, rounded as `rms_norm` rounds it, and multiplies the two; each warp has a run of the inputs. All programs of the
same rows compute the same norm, and the one with the first experts stores it. The last of them to end chooses the rows'
experts. Sums are added in the same order for every number of rows.

One or two rows take a skinny product, whose weight more programs read, and a launch for the choice.
"""

from dataclasses import dataclass
from functools import cached_property

import torch
import triton.language as tl

from proa_engine.kernels.arrive import arrive
from proa_engine.kernels.experts.moe_route import Routing, choose_experts, empty_choice, route, route_reference
from proa_engine.kernels.launch import cdiv, kernel, next_power_of_2, num_multiprocessors
from proa_engine.kernels.products.gpu_linear import GpuLinear
from proa_engine.kernels.products.linear import Linear
from proa_engine.kernels.products.product_tile import new_counters
from proa_engine.kernels.products.skinny_gemm import (
    PLAIN,
    Activation,
    InputForm,
    PlainRows,
    SkinnyGemm,
    UnnormedRows,
    row_arguments,
    skinny_gemm_form,
    skinny_gemm_linear_reference,
)
from proa_engine.kernels.tilings import RouterTile, tilings_of

MAX_ROWS = 256
MAX_EXPERTS = 512
MULTIPLE = 16  # of the inputs: the fewest of a product, and rows of the weight are aligned
ROWS = 8  # of a program
MOST_EXPERTS, FEWEST_EXPERTS = 32, 16
CHUNK = 2048  # inputs of a row that the warps load at once, 8 a thread

Choice = tuple[torch.Tensor, torch.Tensor]  # weights [T, k] float32 and experts [T, k] int32


@dataclass(frozen=True, slots=True)
class Tiling:
    experts: int  # of a program
    chunk: int  # inputs
    num_chunks: int
    num_warps: int

    def max_rows(self, num_experts: int, multiprocessors: int) -> int:
        """The most rows of a step for which this is faster than three launches, 0 if the kernel cannot be used: those
        whose programs take half of the multiprocessors. With more, the L2 cache's bandwidth is the limit, because each
        program reads 192 KiB and more."""
        if self.experts < FEWEST_EXPERTS or num_experts > MAX_EXPERTS:
            return 0
        return min(multiprocessors // 2 // cdiv(num_experts, self.experts) * ROWS, MAX_ROWS)


def choose_tiling(num_inputs: int, tile: RouterTile) -> Tiling:
    """The tiling of a weight of so many inputs, a multiple of `MULTIPLE`."""
    chunk = min(next_power_of_2(num_inputs), CHUNK)
    num_chunks = cdiv(num_inputs, chunk)
    experts = min(tile.weight_numbers // (num_chunks * chunk), MOST_EXPERTS)
    return Tiling(experts, chunk, num_chunks, tile.num_warps)


class Router:
    """Chooses each token's experts by the logits x @ weight.T + bias."""

    input_form: InputForm = PLAIN

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, correction: torch.Tensor | None
    ) -> None:
        """weight [experts, inputs], bias [experts]; `correction` [experts] is added to the scores for the choice."""
        self.linear = Linear(weight, bias)
        self.routing = routing
        self.correction = correction

    def __call__(self, x: Activation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """x [T, inputs] -> x after its norm, weights [T, k] float32 and experts [T, k] int32"""
        assert isinstance(x, torch.Tensor)
        return x, *route(self.linear(x), self.routing, self.correction)


class RouterForm:
    """Input form of a router on a GPU, which computes the norm of few rows itself."""

    def __init__(self, weight: torch.Tensor) -> None:
        """weight [experts, inputs]"""
        self.weight = weight
        self.skinny = skinny_gemm_form(weight)

    @cached_property
    def tiling(self) -> Tiling:
        return choose_tiling(self.weight.shape[1], tilings_of(self.weight.device).router)

    @cached_property
    def together(self) -> SkinnyGemm:
        """Of the steps in which norm, product and choice are one launch."""
        weight = self.weight
        is_aligned = weight.is_contiguous() and weight.data_ptr() % MULTIPLE == weight.shape[1] % MULTIPLE == 0
        if weight.element_size() != 2 or not is_aligned:
            return SkinnyGemm(max_rows=0)
        return SkinnyGemm(self.tiling.max_rows(weight.shape[0], num_multiprocessors(weight.device)))

    def for_rows(self, num_rows: int) -> SkinnyGemm | PlainRows:
        skinny = self.skinny.for_rows(num_rows)
        return skinny if isinstance(skinny, SkinnyGemm) else self.together.for_rows(num_rows)


class GpuRouter:
    """A `Router` on a GPU. It computes the norm of few rows itself."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, correction: torch.Tensor | None
    ) -> None:
        self.linear = GpuLinear(weight, bias)
        self.routing = routing
        self.correction = correction
        self.arrived = new_counters(weight.device)
        self.input_form = RouterForm(weight)

    def __call__(self, x: Activation) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """As `Router`; x in its input form."""
        if isinstance(x, torch.Tensor):
            return x, *route(self.linear(x), self.routing, self.correction)
        assert isinstance(x, UnnormedRows)
        rows = x.keeping_norm()
        if isinstance(self.linear.input_form.for_rows(rows.shape[0]), SkinnyGemm):
            choice = route(self.linear(rows), self.routing, self.correction)
        else:
            weight, bias, tiling = self.linear.weight, self.linear.bias, self.input_form.tiling
            choice = norm_and_route(rows, weight, bias, self.routing, self.correction, self.arrived, tiling)
        assert isinstance(rows.normed, torch.Tensor)
        return rows.normed, *choice


def make_router(
    weight: torch.Tensor, bias: torch.Tensor | None, routing: Routing, correction: torch.Tensor | None
) -> Router | GpuRouter:
    return (Router if weight.is_cpu else GpuRouter)(weight, bias, routing, correction)


def norm_and_route(
    rows: UnnormedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    correction: torch.Tensor | None,
    arrived: torch.Tensor,
    tiling: Tiling,
) -> Choice:
    """Route rows [T, inputs] by the logits of their norm, and store the norm and the sum with the residual.

    `arrived`: of `new_counters`, zeros before and after, for one router at a time. GPU only. The kernel may read the
    weight before the previous kernel has ended.
    """
    (num_rows, num_inputs), num_experts = rows.shape, weight.shape[0]
    arguments = row_arguments(rows)
    assert arguments.x.stride(1) == 1
    assert weight.is_contiguous()
    weights, experts = empty_choice(num_rows, routing, weight.device)
    logits = torch.empty((num_rows, num_experts), dtype=torch.float32, device=weight.device)
    num_blocks, num_parts = cdiv(num_rows, ROWS), cdiv(num_experts, tiling.experts)
    assert num_blocks <= arrived.numel()
    router_kernel[num_parts, num_blocks](
        arguments.x,
        arguments.residual,
        arguments.total,
        arguments.norm_weight,
        arguments.normed,
        weight,
        bias,
        logits,
        arrived,
        correction,
        weights,
        experts,
        num_rows,
        num_experts,
        num_inputs,
        arguments.x.stride(0),
        arguments.eps,
        HAS_RESIDUAL=arguments.constants["HAS_RESIDUAL"],
        HAS_BIAS=bias is not None,
        IN_PARTS=num_parts > 1,
        ROWS=ROWS,
        EXPERTS=tiling.experts,
        CHUNK=tiling.chunk,
        NUM_CHUNKS=tiling.num_chunks,
        RUNS=min(tiling.num_warps, tiling.chunk // MULTIPLE),
        **routing.constants(num_experts, correction),
        num_warps=tiling.num_warps,
    )
    return weights, experts


def norm_and_route_reference(
    rows: UnnormedRows,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    routing: Routing,
    correction: torch.Tensor | None,
) -> Choice:
    return route_reference(skinny_gemm_linear_reference(rows, weight, bias), routing, correction)


@kernel(do_not_specialize=["num_rows"])
def router_kernel(
    x_ptr,  # [num_rows, num_inputs]
    residual_ptr,  # [num_rows, num_inputs], or nothing
    total_ptr,  # [num_rows, num_inputs]: x + residual; x without a residual
    norm_weight_ptr,  # [num_inputs]
    normed_ptr,  # [num_rows, num_inputs]: the norm
    weight_ptr,  # [num_experts, num_inputs]
    bias_ptr,  # [num_experts], or nothing
    logits_ptr,  # [num_rows, num_experts] float32
    arrived_ptr,  # [blocks of rows]: programs that have stored their logits, 0 before and after
    correction_ptr,  # [num_experts], or nothing
    weights_ptr,  # [num_rows, K]
    experts_ptr,  # [num_rows, K]
    num_rows,
    num_experts,
    num_inputs,
    stride_x_row,
    eps,
    HAS_RESIDUAL: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IN_PARTS: tl.constexpr,  # there are more experts than a program has
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    CHUNK: tl.constexpr,
    NUM_CHUNKS: tl.constexpr,
    RUNS: tl.constexpr,  # of a chunk's inputs
    K: tl.constexpr,
    NORMALIZE: tl.constexpr,
    SIGMOID: tl.constexpr,
    CORRECTED: tl.constexpr,
    GROUPS: tl.constexpr,
    CHOSEN_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    SCALE: tl.constexpr,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    RUN: tl.constexpr = CHUNK // RUNS
    part = tl.program_id(0)
    expert = part * EXPERTS + tl.arange(0, EXPERTS)
    expert_mask = expert < num_experts
    column = tl.arange(0, CHUNK)
    # [RUNS, EXPERTS, RUN]: a product for each run, so that each warp multiplies one
    in_runs = (tl.arange(0, RUNS) * RUN)[:, None, None] + tl.arange(0, RUN)[None, None, :]
    weight_place = weight_ptr + expert[None, :, None] * num_inputs + in_runs
    weight_chunks = ()
    norm_weight_chunks = ()
    for chunk in tl.static_range(NUM_CHUNKS):
        start = chunk * CHUNK
        mask = expert_mask[None, :, None] & (start + in_runs < num_inputs)
        weight_chunks += (tl.load(weight_place + start, mask=mask, other=0.0),)  # type: ignore[assignment]
        norm_weight = tl.load(norm_weight_ptr + start + column, mask=start + column < num_inputs, other=0.0)
        norm_weight_chunks += (norm_weight.to(tl.float32),)  # type: ignore[assignment]
    if PDL:
        tl.extra.cuda.gdc_wait()

    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    place = row[:, None] * num_inputs + column[None, :]
    x_place = x_ptr + row[:, None] * stride_x_row + column[None, :]
    row_chunks = ()
    squares = tl.zeros([ROWS], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        start = chunk * CHUNK
        mask = (row < num_rows)[:, None] & (start + column < num_inputs)[None, :]
        x = tl.load(x_place + start, mask=mask, other=0.0).to(tl.float32)
        if HAS_RESIDUAL:
            x += tl.load(residual_ptr + place + start, mask=mask, other=0.0).to(tl.float32)
            # Rounded to the residual's type before the norm, as in the reference.
            x = x.to(residual_ptr.dtype.element_ty).to(tl.float32)
            if part == 0:
                tl.store(total_ptr + place + start, x, mask=mask)
        squares += tl.sum(x * x, axis=1)
        row_chunks += (x,)  # type: ignore[assignment]
    scale = 1.0 / tl.sqrt(squares / num_inputs + eps)
    logits = tl.zeros([RUNS, EXPERTS, ROWS], tl.float32)
    for chunk in tl.static_range(NUM_CHUNKS):
        start = chunk * CHUNK
        normed = row_chunks[chunk] * scale[:, None] * norm_weight_chunks[chunk][None, :]
        normed = normed.to(normed_ptr.dtype.element_ty)
        if part == 0:
            mask = (row < num_rows)[:, None] & (start + column < num_inputs)[None, :]
            tl.store(normed_ptr + place + start, normed, mask=mask)
        # [RUNS, RUN, ROWS]
        normed = tl.permute(tl.reshape(normed, (ROWS, RUNS, RUN)), (1, 2, 0))
        logits = tl.dot(weight_chunks[chunk], normed, logits, input_precision="ieee")
    total = tl.sum(logits, axis=0)
    if HAS_BIAS:
        total += tl.load(bias_ptr + expert, mask=expert_mask, other=0.0).to(tl.float32)[:, None]
    total = total.to(normed_ptr.dtype.element_ty).to(tl.float32)
    tl.store(
        logits_ptr + row[None, :] * num_experts + expert[:, None],
        total,
        mask=(row < num_rows)[None, :] & expert_mask[:, None],
    )

    if IN_PARTS:
        arrived_ptr += tl.program_id(1)
        if not arrive(arrived_ptr, 1, tl.num_programs(0)):
            return
        tl.store(arrived_ptr, 0)
    else:
        tl.debug_barrier()
    choose_experts(
        logits_ptr,
        correction_ptr,
        weights_ptr,
        experts_ptr,
        row,
        num_rows,
        num_experts,
        num_experts,
        K,
        NORMALIZE,
        SIGMOID,
        CORRECTED,
        GROUPS,
        CHOSEN_GROUPS,
        GROUP_BEST,
        SCALE,
        BLOCK_GROUPS,
        BLOCK_SIZE,
        BLOCK_K,
    )
