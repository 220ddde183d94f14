"""The plain-torch kernels, the CPU's backend, against their definitions."""

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from proa_engine.kernels.attention.rotate_and_cache import rotate
from proa_engine.kernels.attention.store_kv import cache_rows, write_to_cache
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm
from proa_engine.kernels.silu_and_mul import ActivationName, activate_and_mul
from support.kernel_cases import attend, attention_case, padded_case


@pytest.mark.parametrize("window", [None, 1, 20, 150])
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 4, "num_kv_heads": 2, "head_dim": 16},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 10},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 64, "block_size": 5},
        {"num_heads": 6, "num_kv_heads": 2, "head_dim": 16, "has_sinks": True, "is_strided": True},
        {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "soft_cap": 3.0, "dtype": torch.bfloat16},
    ],
)
def test_mixed_batch_equals_dense_attention(shape: dict[str, Any], window: int | None) -> None:
    lens = [(1, 1), (1, 16), (1, 17), (1, 300), (1, 420), (5, 5), (33, 290), (130, 130), (2, 129)]
    case = attention_case(lens, window=window, **shape)
    tolerance = 2e-5 if case.query.dtype == torch.float32 else 2e-2
    torch.testing.assert_close(attend(case, window).float(), case.expected, atol=tolerance, rtol=0)


@pytest.mark.parametrize("window", [None, 4, 40])
@pytest.mark.parametrize("block_size", [16, 5])
def test_tokens_of_an_image_attend_to_all_of_it(block_size: int, window: int | None) -> None:
    lens = [(1, 30), (1, 12), (9, 9), (40, 300), (130, 131)]  # the second's image ends with it, as a chunk of one token
    images = [(1, 4, 12), (2, 0, 9), (3, 265, 271), (3, 271, 299), (4, 0, 20), (4, 27, 131)]
    case = attention_case(lens, images=images, block_size=block_size, window=window)
    torch.testing.assert_close(attend(case, window), case.expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("window", [1, 2, 20, 140])
def test_padding_does_not_attend_to_keys_before_the_first_token_of_a_decode(window: int) -> None:
    case = padded_case(attention_case([(1, 40), (3, 300), (2, 2), (5, 31)], window=window), 5)
    torch.testing.assert_close(attend(case, window, decode_width=5), case.expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("block_size", [16, 5])
def test_a_block_of_tokens_attends_to_all_of_it(block_size: int) -> None:
    """The rows begin with 0 to 4 tokens of padding, and are computed token by token or together."""
    lens = [(1, 40), (3, 900), (2, 2), (5, 31), (5, 700)]
    case = padded_case(attention_case(lens, block_size=block_size, num_kv_heads=4, head_dim=64, causal=False), 5)
    torch.testing.assert_close(attend(case, decode_width=5, causal=False), case.expected, atol=2e-5, rtol=0)


def test_a_long_prompt_is_worked_off_in_slices() -> None:
    case = attention_case([(1500, 2000)], num_heads=8, num_kv_heads=2, head_dim=8)
    torch.testing.assert_close(attend(case), case.expected, atol=2e-5, rtol=0)


def test_padding_tokens_behind_the_batch_give_zeros_and_write_nothing() -> None:
    case = attention_case([(1, 9), (1, 20)])
    padded = torch.cat((case.query, torch.full_like(case.query, torch.nan)))
    out = attend(replace(case, query=padded))
    torch.testing.assert_close(out[:2], case.expected, atol=2e-5, rtol=0)
    assert torch.equal(out[2:], torch.zeros_like(case.query))


@pytest.mark.parametrize("is_strided", [False, True])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(is_strided: bool) -> None:
    caches = torch.zeros(2, 6, 3, 4, 5)
    if is_strided:
        caches = torch.zeros(6, 4, 3, 4, 5)[:, 1:3].transpose(0, 1)
    key, value = torch.randn(2, 4, 3, 5)
    rows = cache_rows(torch.tensor([9, -1, 23, 0]), caches[0].shape, caches[0].stride(0))
    write_to_cache(key, value, caches[0], caches[1], rows)
    expected = torch.zeros_like(caches)
    for token, (block, offset) in {0: (2, 1), 2: (5, 3), 3: (0, 0)}.items():
        expected[0, block, :, offset] = key[token]
        expected[1, block, :, offset] = value[token]
    assert torch.equal(caches, expected)


def test_norms() -> None:
    x, residual, weight = torch.randn(5, 24), torch.randn(5, 24), torch.randn(24)

    def expected(row: torch.Tensor) -> torch.Tensor:
        return row / (row.square().mean(-1, keepdim=True) + 1e-6).sqrt() * weight

    torch.testing.assert_close(rms_norm(x, weight, 1e-6), expected(x))
    total = x + residual
    normed, new_residual = add_rms_norm(x.clone(), residual.clone(), weight, 1e-6)
    torch.testing.assert_close(new_residual, total)
    torch.testing.assert_close(normed, expected(total))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [8, 33, 192, 1000, 4096])
def test_rows_of_a_norm_are_exact_and_do_not_depend_on_their_number(size: int, dtype: torch.dtype) -> None:
    x, weight = (torch.randn(300, size) * 3).to(dtype), torch.randn(size).to(dtype)
    whole = rms_norm(x, weight, 1e-5)
    exact = torch.nn.functional.rms_norm(x.double(), (size,), weight.double(), 1e-5)
    torch.testing.assert_close(whole, exact.to(dtype))
    heads = torch.randn(300, 5, size).to(dtype)
    heads[:, 1] = x
    assert torch.equal(rms_norm(heads[:, 1:3], weight, 1e-5)[:, 0], whole)
    for rows in (*range(1, 20), 64, 100, 257):
        assert torch.equal(rms_norm(x[3 : 3 + rows], weight, 1e-5), whole[3 : 3 + rows]), f"{rows} rows"


def test_rotary_turns_pairs_by_their_angles() -> None:
    x, angles = torch.randn(6, 3, 8), torch.randn(6, 4)
    turned = torch.complex(x[..., :4], x[..., 4:]) * torch.polar(torch.ones(6, 1, 4), angles[:, None])
    cos, sin = angles.cos(), angles.sin()
    out = rotate(x, torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))
    torch.testing.assert_close(out, torch.cat((turned.real, turned.imag), -1))


def test_rotary_turns_neighbours_of_the_first_dimensions() -> None:
    x, angles = torch.randn(6, 3, 11), torch.randn(6, 4)
    tables = torch.cat((angles.cos(), angles.cos()), -1), torch.cat((-angles.sin(), angles.sin()), -1)
    turned = torch.view_as_complex(x[..., :8].unflatten(-1, (4, 2)).contiguous()) * torch.polar(
        torch.ones(6, 1, 4), angles[:, None]
    )
    expected = torch.cat((torch.view_as_real(turned).flatten(-2), x[..., 8:]), dim=-1)
    torch.testing.assert_close(rotate(x, *tables, interleaved=True), expected)
    halves = torch.cat((x[..., :8].unflatten(-1, (4, 2)).mT.flatten(-2), x[..., 8:]), dim=-1)
    turned_halves = torch.cat((turned.real, turned.imag, x[..., 8:]), dim=-1)
    torch.testing.assert_close(rotate(halves, *tables), turned_halves)


def test_a_rotation_by_nothing_changes_no_bit() -> None:
    x = torch.randn(6, 3, 8).bfloat16()
    assert torch.equal(rotate(x, torch.ones(6, 8), torch.zeros(6, 8)), x)


def test_gated_activations() -> None:
    x = torch.randn(3, 14) * 50  # far enough for exp to overflow
    gate, up = x.double().chunk(2, dim=-1)
    expected: dict[ActivationName, torch.Tensor] = {
        "silu": F.silu(gate) * up,
        "gelu_tanh": F.gelu(gate, approximate="tanh") * up,
    }
    for activation, theirs in expected.items():
        torch.testing.assert_close(activate_and_mul(x, activation), theirs.float(), msg=activation)
        rows = x.bfloat16()
        torch.testing.assert_close(activate_and_mul(rows[1:2], activation), activate_and_mul(rows, activation)[1:2])
