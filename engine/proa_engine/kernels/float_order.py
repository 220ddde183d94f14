"""Floats as integers that sort like them, so that searches and maxima compare integers."""

import triton
import triton.language as tl


@triton.jit
def order_of(x, UNUSED_BITS: tl.constexpr):
    """Integers that sort like the floats x, of any shape. `UNUSED_BITS`: low bits that are zero in all of them."""
    bits = x.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)) >> UNUSED_BITS


@triton.jit
def float_of(order, UNUSED_BITS: tl.constexpr):
    """The floats of `order_of`."""
    bits = ((order << UNUSED_BITS) | tl.where(order < 0, (1 << UNUSED_BITS) - 1, 0)).to(tl.int32)
    return (bits ^ ((bits >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
