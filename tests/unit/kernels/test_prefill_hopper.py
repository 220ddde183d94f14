"""Attention of prompts on Hopper: what the host decides. The kernel itself is compiled in
tests/system/test_compile_sm90.py and computes in tests/gpu/test_gpu_kernels.py."""

import gc
import weakref
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver

from proa_engine.kernels import tensor_map
from proa_engine.kernels.attention.prefill_hopper import LONG, SHORT, Tiling, _rows_map, choose_tiling, suits
from proa_engine.kernels.tensor_map import encode, launcher_of_values


@pytest.mark.parametrize(
    ("num_tokens", "num_heads", "head_dim", "window", "expected"),
    [
        (128, 32, 128, None, SHORT),
        (1024, 32, 128, None, SHORT),
        (2048, 32, 128, None, LONG),
        (8192, 16, 128, None, LONG),
        (8192, 64, 64, None, LONG),
        (2048, 64, 64, None, SHORT),
        (8192, 64, 64, 128, SHORT),
        (8192, 32, 128, 4096, LONG),
        (2048, 4, 128, None, SHORT),  # of a rank: 64 programs of LONG, 128 of SHORT
    ],
)
def test_tilings_of_measured_shapes(
    num_tokens: int, num_heads: int, head_dim: int, window: int | None, expected: Tiling
) -> None:
    assert choose_tiling(num_tokens, num_heads, head_dim, window) is expected


@pytest.mark.parametrize("window", [None, 128, 4096])
@pytest.mark.parametrize(("num_heads", "head_dim"), [(4, 128), (32, 128), (64, 64)])
def test_longer_prompts_do_not_change_back_to_the_short_tiling(
    num_heads: int, head_dim: int, window: int | None
) -> None:
    chosen = [choose_tiling(num_tokens, num_heads, head_dim, window) for num_tokens in range(1, 9000, 7)]
    assert chosen == sorted(chosen, key=[SHORT, LONG].index)


def caches(
    num_blocks: int = 5, heads: int = 2, block_size: int = 16, head_dim: int = 128, dtype: torch.dtype = torch.bfloat16
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values side by side in each block."""
    keys, values = torch.zeros(num_blocks, 2, heads, block_size, head_dim, dtype=dtype).unbind(1)
    return keys, values


@pytest.mark.parametrize(
    ("options", "num_heads", "expected"),
    [
        ({}, 8, True),
        ({"head_dim": 64, "block_size": 32}, 14, True),
        ({"dtype": torch.float16}, 8, False),
        ({"head_dim": 80}, 8, False),
        ({"head_dim": 256}, 8, False),
        ({"block_size": 8}, 8, False),
        ({"heads": 1}, 64, True),
        ({"heads": 1}, 96, False),
    ],
)
def test_which_queries_and_caches_it_computes(options: dict[str, Any], num_heads: int, expected: bool) -> None:
    keys, _ = caches(**options)
    query = torch.zeros(3, num_heads, keys.shape[-1], dtype=torch.bfloat16)
    assert suits(query, keys) == expected
    assert not suits(query.float(), keys)


def test_a_map_reaches_to_the_last_row_and_is_made_once_without_keeping_the_cache() -> None:
    keys, values = caches()
    of_keys, of_values = _rows_map(keys), _rows_map(values)
    assert of_keys.descriptor.shape == of_values.descriptor.shape == [4 * 64 + 32, 128]
    assert of_keys.descriptor.base.data_ptr() == keys.data_ptr() != of_values.descriptor.base.data_ptr()
    assert _rows_map(keys.view(keys.shape)) is of_keys
    assert of_keys.kind == of_values.kind != _rows_map(caches(block_size=32)[0]).kind
    memory = weakref.ref(keys)
    del keys, values
    gc.collect()
    assert memory() is None


def test_a_launcher_of_values_skips_what_triton_wraps_around_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the wrapper of the Triton that is installed."""
    monkeypatch.setattr(tensor_map, "make_tensordesc_arg", lambda descriptor, metadata: [metadata, *descriptor.shape])
    keys, _ = caches()
    rows = _rows_map(keys)
    metadata: list[dict[str, Any]] = [{"swizzle": 3}]
    encode([rows], SimpleNamespace(metadata=SimpleNamespace(tensordesc_meta=metadata)))
    assert rows.values == [metadata[0], *rows.descriptor.shape]
    launched: list[Any] = []
    signature = {"a": "i32", "b": "tensordesc<bf16[16, 64],layout>"}
    wrapped = driver.wrap_handle_tensordesc(lambda *given: launched.append(given), signature, metadata)
    launcher = SimpleNamespace(launch=wrapped)
    launcher_of_values(launcher).launch(1, 2, *rows.values)
    assert launched == [(1, 2, *rows.values)]
    assert launcher.launch is wrapped
