"""With a host tier, two ranks give the tokens of two ranks without one."""

from pathlib import Path
from typing import Any

from support.cache_families import assert_equal
from support.engine import build_core
from support.host_rounds import HOST, rounds
from support.tiny_models import make_tiny_model


def test_two_ranks_have_hosts_of_their_own(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "qwen3", seed=3)
    config: dict[str, Any] = {"num_gpu_blocks_override": 16, "max_model_len": 256, "tensor_parallel_size": 2}
    with build_core(folder, **config) as engine:
        expected = rounds(engine)
    with build_core(folder, **config | HOST) as engine:
        with_host = rounds(engine)
        host = engine.core.counters().cache.host
    assert_equal(with_host, expected)
    assert host is not None
    assert host.num_loaded_tokens > 500
