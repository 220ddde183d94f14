"""Checks that batch-invariant kernels give a token the same bits in every batch, close to the reference's result.

Shared by the tests in Triton's interpreter and on a GPU.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from proa_engine.kernels.attention.prefill_attention import prefill_attention
from proa_engine.kernels.products.gpu_linear import invariant_linear
from support.kernel_cases import dense_attention

NUM_ROWS = (1, 2, 3, 17, 64)
MAX_ROWS = 130  # three tiles
SCALE = 0.25

Device = torch.device | str


def check_products(
    num_outputs: int, num_inputs: int, dtype: torch.dtype, tolerance: float, device: Device = "cpu"
) -> None:
    weight = torch.randn(num_outputs, num_inputs) / num_inputs**0.5
    x, bias = torch.randn(MAX_ROWS, num_inputs), torch.randn(num_outputs)
    x, weight, bias = (tensor.to(dtype).to(device) for tensor in (x, weight, bias))
    without = invariant_linear(x[:3], weight)
    torch.testing.assert_close(without, F.linear(x[:3], weight), atol=tolerance, rtol=tolerance)
    together = invariant_linear(x, weight, bias)
    torch.testing.assert_close(together, F.linear(x, weight, bias), atol=tolerance, rtol=tolerance)
    for count in NUM_ROWS:
        for first in (0, MAX_ROWS - count):  # at different positions in a tile
            rows = slice(first, first + count)
            assert torch.equal(invariant_linear(x[rows].clone(), weight, bias), together[rows]), (count, first)


def check_attention(
    length: int,
    dtype: torch.dtype,
    tolerance: float,
    device: Device = "cpu",
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    window: int | None,
    scores: dict[str, Any] | None = None,
    has_image: bool = False,
) -> None:
    """Attention of a sequence's tokens: as one prompt, in chunks and as decodes, alone and in a batch.

    `has_image`: the second chunk ends with an image, and so does the second decode.
    """
    middle = length // 2 + 1
    ends = torch.arange(1, length + 1, dtype=torch.int32, device=device)
    if has_image:
        ends[length // 3 + 2 : middle] = middle
    query = torch.randn(length, num_heads, head_dim).to(dtype).to(device)
    num_blocks = -(-length // block_size)
    table = torch.randperm(num_blocks, dtype=torch.int32).to(device)
    caches = torch.randn(2, num_blocks, num_kv_heads, block_size, head_dim).to(dtype).to(device)

    def attend(parts: Sequence[tuple[int, int]]) -> torch.Tensor:
        """A batch of requests that each compute the tokens first … past - 1 of the sequence."""
        rows = torch.cat([query[first % length :][: past - first] for first, past in parts])
        starts = torch.tensor([0, *(past - first for first, past in parts)]).cumsum(0).int().to(device)
        lens = torch.tensor([past for _, past in parts], dtype=torch.int32, device=device)
        tables = table.expand(len(parts), -1).contiguous()
        out = torch.full_like(rows, torch.nan)
        keys, values = caches
        options = dict(scores or {})
        batch = starts, lens, tables, out
        if has_image:
            options["ends"] = torch.cat([ends[first % length :][: past - first] for first, past in parts])
        prefill_attention(rows, keys, values, *batch, 0, SCALE, window, batch_invariant=True, **options)
        return out

    whole = attend([(0, length)])
    key, value = caches[:, table.long()].transpose(2, 3).flatten(1, 2)[:, :length]
    expected = dense_attention(query, key, value, SCALE, window, **scores or {}, ends=ends)
    torch.testing.assert_close(whole.float(), expected, atol=tolerance, rtol=tolerance)
    decodes = [(token, token + 1) for token in (0, length // 2, length - 1)]
    chunks = [(0, length // 3), (length // 3, middle), (middle, length)]
    batches = [*([decode] for decode in decodes), chunks, [*decodes, *chunks], [(middle - 5, middle)]]
    for parts in batches:
        assert torch.equal(attend(parts), torch.cat([whole[first:past] for first, past in parts])), parts
    if not has_image:
        padding = (-1, 0)  # a padding row of a captured decode
        assert (attend([decodes[1], padding])[1] == 0).all()
