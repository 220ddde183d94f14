"""An engine that is started again continues with the blocks that the one before it has left in host memory."""

import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from proa.contract import SamplingParams
from support.engine import Engine, Result, build_core, request, run
from support.tiny_models import make_tiny_model

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("qwen3", {}),
    "windows": (
        "gemma3_text",
        {"num_hidden_layers": 5, "layer_types": ["sliding_attention"] * 4 + ["full_attention"], "sliding_window": 24},
    ),
    "latent": ("deepseek_v3", {}),
    "states": ("qwen3_next", {}),
}
CONFIG: dict[str, Any] = {"num_gpu_blocks_override": 100, "max_model_len": 256, "kv_offloading_size": 0.02}
PROMPT = [*range(5, 155)]
NUM_CACHED = 144  # full blocks before the last token
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)


@pytest.fixture
def folder() -> Iterator[str]:
    with TemporaryDirectory(dir="/dev/shm") as path:
        yield path


def ask(engine: Engine) -> Result:
    """Send the prompt when all is adopted, and let the engine store its blocks."""
    adopt(engine)
    (result,) = run(engine, [request("a", PROMPT, PARAMS)]).values()
    while engine.core.has_work():
        engine.core.step()
    return result


def adopt(engine: Engine) -> None:
    host = engine.core._scheduler._manager._host
    assert host is not None
    deadline = time.monotonic() + 20
    while host._adoption is not None:
        engine.core.wait_for_work(timeout=1.0)
        engine.core.step()
        assert time.monotonic() < deadline
    engine.core.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restarted_engine_continues_with_the_blocks_of_the_one_before(
    family: str, tmp_path: Path, folder: str
) -> None:
    model_type, options = FAMILIES[family]
    model = make_tiny_model(tmp_path, model_type, seed=3, **options)
    with build_core(model, **CONFIG, kv_offloading_path=folder) as engine:
        computed = ask(engine)
    with build_core(model, **CONFIG, kv_offloading_path=folder) as engine:
        adopted = ask(engine)
    assert (computed.num_cached_tokens, adopted.num_cached_tokens) == (0, NUM_CACHED)
    assert adopted.token_ids == computed.token_ids
    assert [each.logprob for each in adopted.logprobs] == pytest.approx(
        [e.logprob for e in computed.logprobs], abs=1e-4
    )
