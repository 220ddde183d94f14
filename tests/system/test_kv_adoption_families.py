"""An engine that is started again continues with the blocks that the one before it has left in host memory."""

import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.core.kv.host_tier import HostTier
from proa_engine.core.kv.mover import FromMover
from proa_engine.core.operations import ResetPrefixCache
from proa_engine.executor.movers import RankMovers
from proa_engine.memory import rank_tiers
from proa_engine.memory.arena_memory import open_file
from proa_engine.memory.rank_tiers import HostTiers
from proa_engine.mover.messages import Adopt
from support.cache_families import FAMILIES, assert_equal, make_cache_family
from support.engine import Engine, Result, build_core, request, run

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
    host = engine.core._tiers.host
    assert isinstance(host, HostTier)
    deadline = time.monotonic() + 20
    while not host._adoption.is_done:
        engine.core.wait_for_work(timeout=1.0)
        engine.core.step()
        assert time.monotonic() < deadline
    engine.core.check_integrity()


@pytest.mark.parametrize("family", FAMILIES)
def test_a_restarted_engine_continues_with_the_blocks_of_the_one_before(
    family: str, tmp_path: Path, folder: str
) -> None:
    model = make_cache_family(tmp_path, family)
    with build_core(model, **CONFIG, kv_offloading_path=folder) as engine:
        computed = ask(engine)
    with build_core(model, **CONFIG, kv_offloading_path=folder) as engine:
        adopted = ask(engine)
    assert (computed.num_cached_tokens, adopted.num_cached_tokens) == (0, NUM_CACHED)
    assert_equal([adopted], [computed])


def restarted(folder: str, **config: Any) -> int:
    """The cached tokens of the prompt in an engine of the built-in model that is started again."""
    with build_core(builtin_model_folder(), **{**CONFIG, "kv_offloading_path": folder, **config}) as engine:
        return ask(engine).num_cached_tokens


def test_an_engine_of_another_configuration_begins_anew(folder: str) -> None:
    assert restarted(folder) == 0
    assert restarted(folder, kv_cache_dtype="fp8") == 0
    assert restarted(folder) == 0, "its file was emptied"


def test_nothing_from_before_a_reset_is_adopted(folder: str) -> None:
    with build_core(builtin_model_folder(), **CONFIG, kv_offloading_path=folder) as engine:
        ask(engine)
        engine.core.operate(ResetPrefixCache(time.time()))
        engine.core.step()
    assert restarted(folder) == 0


def test_a_damaged_page_ends_the_prefix(folder: str) -> None:
    assert restarted(folder) == 0
    path = Path(folder) / "rank-0.arena"
    content = bytearray(path.read_bytes())
    with build_core(builtin_model_folder(), **CONFIG) as engine:
        tiers = engine.executor._worker.tiers
        assert isinstance(tiers, HostTiers)
        layout = tiers.arena.memory.layout
    start = layout.pages_offset + 4 * layout.page_bytes  # blocks are in pages in a row
    content[start] ^= 1
    path.write_bytes(content)
    assert restarted(folder) == 4 * 16
    assert restarted(folder) == NUM_CACHED, "the damaged block was computed and stored again"


def test_a_second_engine_on_the_folder_is_refused(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_tiers, "open_file", partial(open_file, lock_seconds=0.1))
    with (
        build_core(builtin_model_folder(), **CONFIG, kv_offloading_path=folder),
        pytest.raises(ValueError, match=r"kv_offloading_path: .* is in use by another engine"),
        build_core(builtin_model_folder(), **CONFIG, kv_offloading_path=folder),
    ):
        pass


def test_adopted_blocks_are_reported(folder: str) -> None:
    assert restarted(folder) == 0
    with build_core(builtin_model_folder(), **CONFIG, kv_offloading_path=folder) as engine:
        assert engine.executor.started.kv_transfer is None, "its mover serves no other engines"
        engine.core.follow_kv_events()
        stored: dict[bytes, None] = {}
        num_blocks = NUM_CACHED // 16 + 1  # the last one has generated tokens too
        deadline = time.monotonic() + 20
        while len(stored) < num_blocks and time.monotonic() < deadline:
            engine.core.wait_for_work(timeout=1.0)
            outputs = engine.core.step()
            if outputs is not None and outputs.kv_events is not None and outputs.kv_events.host is not None:
                stored |= dict.fromkeys(outputs.kv_events.host.snapshot or ()) | outputs.kv_events.host.changes.stored
        assert len(stored) == num_blocks


def test_a_mover_that_dies_before_it_answers_adopts_nothing(folder: str) -> None:
    assert restarted(folder) == 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(RankMovers, "listen", _listen_without_mover)
        assert restarted(folder) == 0


def _listen_without_mover(movers: RankMovers, on_message: Callable[[FromMover], None]) -> None:
    """Kill the mover of the only rank before it is asked."""
    movers._on_message = on_message
    mover = movers._send.__self__._worker.tiers.mover  # type: ignore[attr-defined]
    mover._process.kill()
    mover._process.wait()
    movers._send(Adopt())
