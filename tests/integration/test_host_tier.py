"""With a host tier, a pressed cache gives the tokens of an unpressed one, for every kind of cache."""

from pathlib import Path
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.core.operations import ResetPrefixCache, Sleep, WakeUp
from support.cache_families import FAMILIES, assert_equal, make_cache_family
from support.engine import Result, build_core, request, run
from support.host_rounds import HOST, rounds
from support.tiny_models import make_tiny_model

NUM_BLOCKS = {"windows": 44}  # for one of the longest requests
OTHER_STATES = ("lfm2", "nemotron_h")


@pytest.fixture(params=[*FAMILIES, *OTHER_STATES])
def family(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Path, dict[str, Any]]:
    """A folder with a tiny model, and the configuration of a pressed cache."""
    if request.param in OTHER_STATES:
        folder = make_tiny_model(tmp_path, request.param, seed=3)
    else:
        folder = make_cache_family(tmp_path, request.param)
    return folder, {
        "num_gpu_blocks_override": NUM_BLOCKS.get(request.param, 16),
        "max_model_len": 256,
        "max_num_batched_tokens": 48,
    }


def test_a_pressed_cache_with_a_host_gives_the_tokens_of_an_unpressed_one(family: tuple[Path, dict[str, Any]]) -> None:
    folder, config = family
    with build_core(folder, poison=True, block_seed=3, **config | HOST) as engine:
        with_host = rounds(engine)
        host = engine.core.counters().cache.host
    with build_core(folder, **config | {"num_gpu_blocks_override": 600}) as engine:
        expected = rounds(engine)
    assert_equal(with_host, expected)
    assert host is not None
    assert host.num_loaded_tokens > 500


def test_the_host_outlives_a_sleep_and_not_a_reset() -> None:
    config: dict[str, Any] = {"num_gpu_blocks_override": 600, "max_model_len": 256}
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with build_core(builtin_model_folder(), **config | HOST) as engine:

        def ask(name: str) -> Result:
            (result,) = run(engine, [request(name, range(5, 133), params)]).values()
            return result

        first = ask("a")
        while engine.core.has_work():
            engine.core.step()
        for operation in (Sleep(1), WakeUp()):
            done = engine.core.operate(operation)
            while not done.done():
                engine.core.step()
        second = ask("b")
        assert (first.num_cached_tokens, second.num_cached_tokens) == (0, 112)
        assert second.token_ids == first.token_ids
        engine.core.operate(ResetPrefixCache())
        assert ask("c").num_cached_tokens == 0
