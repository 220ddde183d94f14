"""Models on a GPU against the same models on the CPU."""

from pathlib import Path

import pytest
import torch

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.config import ModelConfig
from proa_engine.models.loader import load_model
from support.paged_model import PagedModel
from support.tiny_models import ARCHITECTURES, RECURRENT, make_tiny_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 0.2}


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *RECURRENT])
def test_logits_on_the_gpu_equal_those_on_the_cpu(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture)
    config = ModelConfig.from_folder(folder)
    tokens = [token % 250 for token in range(200)]
    logits = {}
    for device, device_dtype in (("cpu", torch.float32), ("cuda", dtype)):
        model = load_model(
            folder,
            config,
            dtype=device_dtype,
            device=torch.device(device),
            parallel=ParallelContext(),
            report=lambda line: None,
        )
        paged = PagedModel(model, dtype=device_dtype, device=device)
        logits[device] = model.compute_logits(paged.prefill(tokens, 70)).float().cpu()
    torch.testing.assert_close(logits["cuda"], logits["cpu"], atol=TOLERANCE[dtype], rtol=0)
