"""Check the contract of `Linear` with the instruction sets that this process's environment names.

Prints one JSON object: `broken`, the products whose bits depend on their rows, and `unsupported`, the shapes for which
`Linear` itself found no way to keep its contract.
"""

import itertools
import json
import random
import sys

import torch

from proa_engine.kernels.products.linear import Linear, find_row_policy

SHAPES = [  # in_features, out_features
    (1, 1),
    (33, 65),
    (192, 576),
    (513, 16),
    (960, 100),
    (1024, 16),
    (1025, 130),
    (1536, 1),
    (1536, 200),
    (2048, 96),
    (4096, 130),
    (8192, 64),
    (128, 4500),  # more outputs than the probe multiplies
]
MAX_ROWS = 300
NUM_COUNTS = 12


def broken_products(linear: Linear, x: torch.Tensor, whole: torch.Tensor, num_threads: int) -> list[str]:
    """Multiply parts of x [MAX_ROWS, in_features] and compare them with their rows of `whole`, its product."""
    torch.set_num_threads(num_threads)
    broken = []
    for count in (1, 2, *random.sample(range(3, MAX_ROWS + 1), NUM_COUNTS - 2)):
        first = random.randint(0, MAX_ROWS - count)
        if not torch.equal(linear(x[first : first + count]), whole[first : first + count]):
            broken.append(f"weight {list(linear.shape)}, {count} rows from {first}, {num_threads} threads")
    return broken


def main(num_threads: int) -> None:
    torch.manual_seed(0)
    random.seed(0)
    broken, unsupported = [], []
    for (in_features, out_features), half in itertools.product(SHAPES, (False, True)):
        weight, x = torch.randn(out_features, in_features), torch.randn(MAX_ROWS, in_features)
        weight = weight.half().float() if half else weight
        bias = torch.randn(out_features) if random.random() < 0.5 else None
        torch.set_num_threads(num_threads)
        linear = Linear(weight, bias)
        if not find_row_policy(*weight.shape, bias is not None, weight.dtype, num_threads).holds:
            unsupported.append(str(list(weight.shape)))
            continue
        whole = linear(x)
        assert torch.allclose(whole, torch.nn.functional.linear(x, weight, bias), atol=2e-3, rtol=1e-4), weight.shape
        for threads in sorted({1, num_threads}):
            broken += broken_products(linear, x, whole, threads)
    print(json.dumps({"broken": broken, "unsupported": unsupported}))


if __name__ == "__main__":
    main(int(sys.argv[1]))
