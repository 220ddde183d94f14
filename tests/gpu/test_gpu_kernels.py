"""The Triton kernels on a GPU against their references. Run all of this folder with: pytest tests/gpu -m gpu"""

import pytest
import torch

from proa_engine.kernels.reshape_and_cache import reshape_and_cache
from proa_engine.kernels.rms_norm import add_rms_norm, rms_norm
from proa_engine.kernels.rotary import rotary
from proa_engine.kernels.silu_and_mul import silu_and_mul
from support.kernel_cases import attend, attention_case

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
DTYPES = list(TOLERANCE)


def close(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    tolerance = TOLERANCE[ours.dtype]
    torch.testing.assert_close(ours.float().cpu(), theirs.float(), atol=tolerance, rtol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 16), (5, 123), (300, 4096)])
def test_norms(rows: int, size: int, dtype: torch.dtype) -> None:
    x, residual = torch.randn(2, rows, size).to(dtype)
    weight = torch.randn(size).to(dtype)
    close(rms_norm(x.cuda(), weight.cuda(), 1e-6), rms_norm(x, weight, 1e-6))
    normed, total = add_rms_norm(x.cuda(), residual.cuda(), weight.cuda(), 1e-6)
    expected, expected_total = add_rms_norm(x, residual, weight, 1e-6)
    close(normed, expected)
    close(total, expected_total)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rotary_silu_and_cache_writes(dtype: torch.dtype) -> None:
    heads = torch.randn(37, 10, 128).to(dtype)
    cos, sin = torch.randn(2, 37, 64)
    cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
    close(rotary(heads.cuda()[:, :6], cos.cuda(), sin.cuda()), rotary(heads[:, :6], cos, sin))
    x = torch.randn(37, 2 * 3072).to(dtype)
    close(silu_and_mul(x.cuda()), silu_and_mul(x))
    slots = torch.randperm(160)[:37]
    slots[5] = -1
    caches = torch.zeros(2, 10, 2, 16, 128, dtype=dtype)
    on_gpu = caches.cuda()
    reshape_and_cache(heads[:, 6:8], heads[:, 8:], caches[0], caches[1], slots)
    reshape_and_cache(heads.cuda()[:, 6:8], heads.cuda()[:, 8:], on_gpu[0], on_gpu[1], slots.cuda())
    assert torch.equal(on_gpu.cpu(), caches)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128},
        {"num_heads": 7, "num_kv_heads": 1, "head_dim": 64, "block_size": 8},
        {"num_heads": 4, "num_kv_heads": 4, "head_dim": 80},
    ],
)
@pytest.mark.parametrize(
    "lens", [[(1, n) for n in (1, 16, 17, 700)], [(1, 33), (1, 900), (3, 3), (70, 400), (500, 500)]]
)
def test_attention_of_decodes_and_of_mixed_batches(
    lens: list[tuple[int, int]], shape: dict[str, int], dtype: torch.dtype, window: int | None
) -> None:
    case = attention_case(lens, window=window, scale=0.1, dtype=dtype, device="cuda", **shape)
    close(attend(case, window, 0.1), case.expected.cpu())
