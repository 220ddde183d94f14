"""Products of few rows against their reference in Triton's interpreter."""

import itertools

import torch

from support.few_rows_products import few_rows_products
from support.interpreter import close
from support.thorough import THOROUGH

# Of six kinds in each of five shapes: each kind once, and each shape. Whole tiles and parts in turn.
EVERY = 1 if THOROUGH else 5


def check_products(dtype: torch.dtype) -> None:
    """Of 16 bits and 8, with one scale for each row or one for all; whole tiles and parts; bias and gate."""
    for number, product in enumerate(itertools.islice(few_rows_products(dtype), 0, None, EVERY)):
        expected = product.expected()
        for tiling in product.tilings() if THOROUGH else itertools.islice(product.tilings(), number % 2, None, 2):
            close(product.compute(tiling), expected)
