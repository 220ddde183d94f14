"""Products of few rows against their reference in Triton's interpreter."""

import itertools

import torch

from support.few_rows_products import few_rows_products
from support.interpreter import close
from support.thorough import THOROUGH

EVERY = 1 if THOROUGH else 5  # of six kinds in each of five shapes: each kind once, and each shape


def check_products(dtype: torch.dtype) -> None:
    """Of 16 bits and 8, with one scale for each row or one for all; whole tiles and parts; bias and gate."""
    for product in itertools.islice(few_rows_products(dtype), 0, None, EVERY):
        expected = product.expected()
        for tiling in product.tilings():
            close(product.compute(tiling), expected)


CHECKS = (check_products,)
