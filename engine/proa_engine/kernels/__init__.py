"""Triton kernels, the operations that launch them, and what a CPU computes instead.

Which kernel multiplies how many rows (`products`), or (token, expert) pairs (`experts`), on a GPU. The word in the
first column is in the names of all that belongs to such kernels, and in no others:

    skinny     1 or 2 rows of floats or 8-bit floats, without tensor cores; the norm before and the activation after
               are part of the launch: skinny_gemm, skinny_fp8
               1 or 2 tokens, of floats without biases: moe_skinny
    few        up to 64 rows of 16-bit floats, or 256 of 8-bit floats, on Hopper, in the tilings that are faster than
               cuBLAS: few_rows
               up to 64 pairs of any format, which are not sorted: moe_few
    (none)     more rows, and all rows of the other formats: cuBLAS for floats, fp8_linear, int8_linear, int_linear,
               fp4_linear. Batch-invariant floats of any number of rows: gpu_linear
               more pairs, sorted by expert: moe_pairs with moe for floats and 8-bit numbers, moe_int, moe_fp4
"""
