"""The noise of `draw_tokens`, and what it must be, for tests with and without a GPU."""

import torch
import triton.language as tl
from torch import Tensor

from proa_engine.kernels.launch import cdiv, kernel
from proa_engine.kernels.sampling.draw_tokens import noise_of_words
from proa_engine.kernels.sampling.sampling_reference import random_words, row_words

BLOCK = 8192
PROBABILITIES = (0.4, 0.25, 0.15, 0.1, 0.05, 0.03, 0.015, 0.005)


@kernel
def noise_kernel(words_ptr, noise_ptr, num_words, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton's language
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(words_ptr + place, mask=place < num_words, other=0).to(tl.uint32)
    tl.store(noise_ptr + place, noise_of_words(words), mask=place < num_words)


def noise_of(words: Tensor) -> Tensor:
    """words [N] int64, below 2^31 -> their noise [N] float32."""
    noise = torch.empty_like(words, dtype=torch.float32)
    noise_kernel[(cdiv(len(words), BLOCK),)](words, noise, len(words), BLOCK=BLOCK)
    return noise


def words_of_all_sizes() -> Tensor:
    """[N] int64: words of the whole range, of both ends, and those between which the computation changes."""
    ends = torch.arange(3000)
    turn = 2**27  # 1/16 of the range
    return torch.cat([torch.arange(0, 2**31, 9973), ends, turn - 1500 + ends, 2**31 - 1 - ends])


def exact_noise(words: Tensor) -> Tensor:
    """In float64, of the numbers in float32 that stand for the words."""
    uniform = ((words.float() + 0.5) * 2.0**-31).clamp(max=1 - 2.0**-24).double()
    return -torch.log(-torch.log1p(-uniform))


def chi_square_of_draws(num_rows: int, device: torch.device | str) -> float:
    """Of so many tokens drawn with `PROBABILITIES`: 7 degrees of freedom, 24.3 or less in 999 of 1,000 cases."""
    positions = torch.arange(num_rows, dtype=torch.int32)
    tokens = torch.arange(len(PROBABILITIES), dtype=torch.int32)
    words = random_words(*row_words(positions * 0 + 12345, positions * 0 + 678, positions), tokens) & 0x7FFFFFFF
    noise = noise_of(words.long().flatten().to(device)).cpu().view(words.shape)
    probabilities = torch.tensor(PROBABILITIES)
    counts = torch.bincount((probabilities.log() + noise).argmax(-1), minlength=len(tokens))
    expected = probabilities.double() * num_rows
    return float(((counts - expected) ** 2 / expected).sum())
