"""Merge the parts of a decode's split context, in Triton. Each part is the softmax state of one item of `decode_plan`:

m = max(m_i);  out = sum(exp(m_i - m) * acc_i) / sum(exp(m_i - m) * total_i)
"""

import triton
import triton.language as tl


@triton.jit
def store_part(
    acc_ptr,  # [max_items, PART_SIZE, HEAD_DIM] float32, of all parts
    state_ptr,  # [2, max_items, PART_SIZE] float32: maximum and total
    arrived_ptr,  # of this row: how many of its parts are stored
    part,  # [BLOCK_M] int64: item * PART_SIZE + place of each row in the part
    state_size,  # max_items * PART_SIZE
    maximum,  # [BLOCK_M] float32, as `total` and `acc` the state
    total,  # [BLOCK_M]
    acc,  # [BLOCK_M, BLOCK_D]
    mask,  # [BLOCK_M]
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store a part and return how many parts of the row were stored before."""
    dim = tl.arange(0, BLOCK_D)
    in_head = mask[:, None] & (dim < HEAD_DIM)[None, :]
    tl.store(acc_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], acc, mask=in_head)
    tl.store(state_ptr + part, maximum, mask=mask)
    tl.store(state_ptr + state_size + part, total, mask=mask)
    # Every thread's stores come before the release, and every thread's loads after the acquire.
    tl.debug_barrier()
    num_arrived = tl.atomic_add(arrived_ptr, 1, sem="acq_rel", scope="gpu")
    tl.debug_barrier()
    return num_arrived


@triton.jit
def merge_parts(
    acc_ptr,
    state_ptr,
    first_part,  # [BLOCK_M] int64: of the row's first item
    state_size,
    num_splits,
    mask,
    PART_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MAY_SEE_NOTHING: tl.constexpr,  # whether a query token may attend to no token of a part
    UNROLL: tl.constexpr,  # parts that are loaded at a time
):
    """Merge a row's parts, in the order of its items. Returns total [BLOCK_M] and acc [BLOCK_M, BLOCK_D]."""
    dim = tl.arange(0, BLOCK_D)
    in_head = mask[:, None] & (dim < HEAD_DIM)[None, :]
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for split in tl.range(0, num_splits, loop_unroll_factor=UNROLL):
        part = first_part + split * PART_SIZE
        # From the L2 cache, because other multiprocessors wrote it.
        part_maximum = tl.load(state_ptr + part, mask=mask, other=0.0, cache_modifier=".cg")
        part_total = tl.load(state_ptr + state_size + part, mask=mask, other=0.0, cache_modifier=".cg")
        part_acc = tl.load(
            acc_ptr + (part * HEAD_DIM)[:, None] + dim[None, :], mask=in_head, other=0.0, cache_modifier=".cg"
        )
        new_maximum = tl.maximum(maximum, part_maximum)
        # If all parts so far have the maximum -inf, -inf - -inf would be NaN.
        safe_maximum = tl.where(new_maximum == float("-inf"), 0.0, new_maximum) if MAY_SEE_NOTHING else new_maximum
        rescale = tl.exp2(maximum - safe_maximum)
        part_scale = tl.exp2(part_maximum - safe_maximum)
        total = total * rescale + part_total * part_scale
        acc = acc * rescale[:, None] + part_acc * part_scale[:, None]
        maximum = new_maximum
    return total, acc
