"""Sample one token for each row of a batch: greedily, or with the Gumbel-max trick among the tokens that limits allow.

    token = argmax over x >= threshold of  x / temperature + noise(key, position, token id)

Two kernels: the best token of each chunk of the vocabulary (grid: rows, chunks), then the best of those (grid: rows).
Logits are read once, in their own type, and are not changed. For decodes the second kernel also writes the tokens to
the token table, where the next step reads them.

The noise has the random words of `sampling.gumbel`, but its logarithms are the hardware's, one instruction each in
place of 20. It is within 1e-5 of the reference's, so a token drawn on a CPU may differ where two tokens are that close.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from proa_engine.kernels.launch import INTERPRETED, cdiv, kernel, next_power_of_2
from proa_engine.kernels.sampling import sampling_params as columns
from proa_engine.kernels.sampling import sampling_reference as sampling
from proa_engine.kernels.sampling.token_limits import token_limits, token_limits_reference

CHUNK = 8192

# the constants of `sampling`
START_A = tl.constexpr(0x243F6A88)
START_B = tl.constexpr(0x13198A2E)
MULTIPLIER_1 = tl.constexpr(0x7FEB352D)
MULTIPLIER_2 = tl.constexpr(0x846CA68B)

LN_2 = tl.constexpr(0.6931471805599453)
# The interpreter has no functions of libdevice.
HARDWARE = tl.constexpr(not INTERPRETED)


def draw_tokens(
    logits: torch.Tensor, params: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *, has_limits: bool
) -> torch.Tensor:
    """logits [rows, vocab] -> token ids [rows] int64; among equal values the lowest id.

    Row r uses row slots[r] of `params` (columns as in `sampling_params`), and its token gets position positions[r];
    both are [rows] int64. Without `has_limits` no row has top-k, top-p or min-p.
    """
    return _draw(logits, params, slots, positions, has_limits=has_limits)


def draw_decodes(
    logits: torch.Tensor, params: torch.Tensor, rows: torch.Tensor, token_ids: torch.Tensor
) -> torch.Tensor:
    """logits [R, vocab] of decodes -> their next tokens [R] int64, which are also written to `token_ids`.

    rows [3, R] int64 are slots, ends and numbers of tokens, as `decode_inputs` takes them: a row's next token has its
    end as position. A padding row, of no tokens, writes nothing. token_ids [slots, length] int32 is by slot.
    """
    assert rows.is_contiguous()
    assert token_ids.is_contiguous()
    slots, ends, num_tokens = rows
    if logits.is_cpu and not INTERPRETED:
        drawn = draw_tokens_reference(logits, params, slots, ends, has_limits=True)
        is_decode = num_tokens > 0
        token_ids[slots[is_decode], ends[is_decode]] = drawn[is_decode].int()
        return drawn
    # The host does not know whether a row has limits when this is captured; rows without return at once.
    return _draw(logits, params, slots, ends, has_limits=True, token_ids=token_ids, num_tokens=num_tokens)


def _draw(
    logits: torch.Tensor,
    params: torch.Tensor,
    slots: torch.Tensor,
    positions: torch.Tensor,
    *,
    has_limits: bool,
    token_ids: torch.Tensor | None = None,
    num_tokens: torch.Tensor | None = None,
) -> torch.Tensor:
    rows, vocab_size = logits.shape
    assert logits.stride(1) == 1
    assert params.is_contiguous()
    thresholds = token_limits(logits, params, slots) if has_limits else None
    num_chunks = cdiv(vocab_size, CHUNK)
    best = torch.empty(rows, num_chunks, dtype=torch.float32, device=logits.device)
    best_id = torch.empty(rows, num_chunks, dtype=torch.int32, device=logits.device)
    drawn = torch.empty(rows, dtype=torch.int64, device=logits.device)
    draw_chunk_kernel[(rows, num_chunks)](
        logits,
        params,
        slots,
        positions,
        thresholds,
        best,
        best_id,
        vocab_size,
        logits.stride(0),
        num_chunks,
        TEMPERATURE=columns.TEMPERATURE,
        KEY_LO=columns.KEY_LO,
        KEY_HI=columns.KEY_HI,
        NUM_COLUMNS=columns.NUM_COLUMNS,
        MIN_TEMPERATURE=columns.MIN_TEMPERATURE,
        HAS_LIMITS=has_limits,
        CHUNK=CHUNK,
        num_warps=8,
    )
    best_of_chunks_kernel[(rows,)](
        best,
        best_id,
        drawn,
        slots,
        positions,
        num_tokens,
        token_ids,
        num_chunks,
        0 if token_ids is None else token_ids.shape[1],
        BLOCK=next_power_of_2(num_chunks),
        num_warps=1,
    )
    return drawn


def draw_tokens_reference(
    logits: torch.Tensor, params: torch.Tensor, slots: torch.Tensor, positions: torch.Tensor, *, has_limits: bool
) -> torch.Tensor:
    logits, chosen = logits.float(), params[slots]
    temperature = chosen[:, columns.TEMPERATURE].float()
    if has_limits:
        thresholds = token_limits_reference(logits, params, slots)
        logits = logits.masked_fill(logits < thresholds[:, None], -torch.inf)
    is_random = temperature >= columns.MIN_TEMPERATURE
    scaled = logits / torch.where(is_random, temperature, 1.0)[:, None]
    key_lo, key_hi = (chosen[:, column].long().int() for column in (columns.KEY_LO, columns.KEY_HI))
    drawn = sampling.sample(scaled, key_lo, key_hi, positions.int())
    return torch.where(is_random, drawn, sampling.greedy(logits))


@triton.jit
def mix(words):
    words = words ^ (words >> 16)
    words = words * MULTIPLIER_1
    words = words ^ (words >> 15)
    words = words * MULTIPLIER_2
    return words ^ (words >> 16)


@triton.jit
def gumbel(key_lo, key_hi, position, token_ids):
    """Noise for token ids [BLOCK] uint32 of a row; the scalars are uint32."""
    a = mix(mix(mix(key_lo ^ START_A) ^ key_hi) ^ position)
    b = mix(mix(mix(key_hi ^ START_B) ^ key_lo) + position)
    words = a ^ token_ids
    words = words ^ (words >> 16)
    words = words * MULTIPLIER_1 + b
    words = words ^ (words >> 15)
    words = words * MULTIPLIER_2
    return noise_of_words((words ^ (words >> 16)) & 0x7FFFFFFF)


@triton.jit
def noise_of_words(words):
    """Words below 2^31, [BLOCK] uint32 -> standard Gumbel noise [BLOCK] float32."""
    # 0.5 … 2^31 in units of 2^-31, the end cut as in the reference
    uniform = tl.minimum(words.to(tl.float32) * 4.656612873077393e-10 + 2.3283064365386963e-10, 0.99999994)
    # -log1p(-u). Near 1 the hardware's logarithm is within 2^-22 absolutely, which is too little for small u: up to
    # 1/16 four terms of the series are as exact, 3e-6 relatively.
    series = uniform * (1.0 + uniform * (0.5 + uniform * (0.3333333333 + uniform * 0.25)))
    exponential = tl.where(uniform < 0.0625, series, log2(1.0 - uniform) * -LN_2)
    return log2(exponential) * -LN_2


@triton.jit
def log2(x):
    """Of normal numbers."""
    if HARDWARE:
        return libdevice.fast_log2f(x)
    return tl.log2(x)


@kernel(
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr"],
)
def draw_chunk_kernel(
    logits_ptr,  # [rows, vocab_size]
    params_ptr,  # [slots, NUM_COLUMNS] float64
    slots_ptr,  # [rows] int64
    positions_ptr,  # [rows] int64
    thresholds_ptr,  # [rows] float32
    best_ptr,  # [rows, num_chunks] float32
    best_id_ptr,  # [rows, num_chunks] int32
    vocab_size,
    stride_logits_row,
    num_chunks,
    TEMPERATURE: tl.constexpr,
    KEY_LO: tl.constexpr,
    KEY_HI: tl.constexpr,
    NUM_COLUMNS: tl.constexpr,
    MIN_TEMPERATURE: tl.constexpr,
    HAS_LIMITS: tl.constexpr,
    CHUNK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    params_ptr += tl.load(slots_ptr + row) * NUM_COLUMNS
    temperature = tl.load(params_ptr + TEMPERATURE).to(tl.float32)
    token = chunk * CHUNK + tl.arange(0, CHUNK)
    mask = token < vocab_size
    # [CHUNK]
    x = tl.load(logits_ptr + row * stride_logits_row + token, mask=mask, other=float("-inf")).to(tl.float32)
    x = tl.where(x == x, x, float("-inf"))  # NaN would win the argmax, also behind the end of the vocabulary
    if HAS_LIMITS:
        x = tl.where(x < tl.load(thresholds_ptr + row), float("-inf"), x)
    if temperature >= MIN_TEMPERATURE:
        key_lo = tl.load(params_ptr + KEY_LO).to(tl.int64).to(tl.uint32)
        key_hi = tl.load(params_ptr + KEY_HI).to(tl.int64).to(tl.uint32)
        position = tl.load(positions_ptr + row).to(tl.uint32)
        x = x * (1.0 / temperature) + gumbel(key_lo, key_hi, position, token.to(tl.uint32))
    best, best_index = tl.max(x, axis=0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_ptr + row * num_chunks + chunk, best)
    tl.store(best_id_ptr + row * num_chunks + chunk, chunk * CHUNK + best_index)


@kernel(
    do_not_specialize=["token_width"],
    do_not_specialize_on_alignment=["slots_ptr", "positions_ptr", "num_tokens_ptr"],
)
def best_of_chunks_kernel(
    best_ptr,  # [rows, num_chunks] float32
    best_id_ptr,  # [rows, num_chunks] int32
    drawn_ptr,  # [rows] int64
    slots_ptr,  # [rows] int64
    positions_ptr,  # [rows] int64
    num_tokens_ptr,  # [rows] int64, 0: the row writes no token; or None
    token_ids_ptr,  # [slots, token_width] int32, or None
    num_chunks,
    token_width,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, BLOCK)
    best = tl.load(best_ptr + row * num_chunks + chunk, mask=chunk < num_chunks, other=float("-inf"))
    _, best_chunk = tl.max(best, axis=0, return_indices=True, return_indices_tie_break_left=True)
    drawn = tl.load(best_id_ptr + row * num_chunks + best_chunk)
    tl.store(drawn_ptr + row, drawn.to(tl.int64))
    if token_ids_ptr is not None:
        place = tl.load(slots_ptr + row) * token_width + tl.load(positions_ptr + row)
        tl.store(token_ids_ptr + place, drawn, mask=tl.load(num_tokens_ptr + row) > 0)
