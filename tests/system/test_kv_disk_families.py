"""Blocks that an engine has written to disk give the tokens that are computed without, for every kind of cache."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.contract import SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.core.operations import ResetPrefixCache
from support.cache_families import FAMILIES, assert_equal, make_cache_family
from support.engine import Engine, Result, build_core, request, run

PROMPT = [*range(5, 155)]
NUM_CACHED = 144  # full blocks before the last token
OTHERS = [[(7 * index + salt) % 200 + 5 for index in range(150)] for salt in range(4)]  # more than the device holds
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)


class DiskEngine:
    """An engine, and what it knows of its disk."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._num_asked = 0

    @property
    def num_on_disk(self) -> int:
        disk = self.engine.core.counters().cache.disk
        assert disk is not None
        return disk.num_blocks

    def ask(self, prompt: list[int] = PROMPT, cache_salt: str = "") -> Result:
        """Send a prompt, and let the engine store its blocks."""
        self._num_asked += 1
        asked = replace(request(f"{self._num_asked}", prompt, PARAMS), cache_salt=cache_salt)
        (result,) = run(self.engine, [asked]).values()
        self._step()
        return result

    def press(self) -> None:
        """Ask other prompts, until the device has nothing of the first one."""
        for prompt in OTHERS:
            self.ask(prompt)

    def wait_for(self, is_met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + 20
        while not is_met():
            assert time.monotonic() < deadline
            self.engine.core.wait_for_work(timeout=0.05)
            self._step()

    def write(self) -> Result:
        """Have the prompt written: ask it twice, the second time from host memory. Returns the first answer."""
        computed = self.ask()
        self.press()
        assert self.ask().num_cached_tokens == NUM_CACHED
        self.wait_for(lambda: self.num_on_disk >= NUM_CACHED // 16)
        return computed

    def _step(self) -> None:
        while self.engine.core.has_work():
            self.engine.core.step()


@contextmanager
def running(model: Path | str, disk: Path, **options: Any) -> Iterator[DiskEngine]:
    """An engine whose device holds a few prompts."""
    config: dict[str, Any] = {
        "num_gpu_blocks_override": 40,
        "max_model_len": 256,
        "max_num_seqs": 4,
        "kv_offloading_size": 0.02,
        "kv_disk_path": str(disk),
        "kv_disk_size": 0.02,
    }
    with build_core(model, **config | options) as engine:
        yield DiskEngine(engine)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_later_engine_continues_with_the_blocks_on_disk(family: str, tmp_path: Path) -> None:
    model = make_cache_family(tmp_path, family)
    sizes = {"num_gpu_blocks_override": 90} if family == "windows" else {}
    with running(model, tmp_path / "disk", **sizes) as engine:
        computed = engine.write()
    with running(model, tmp_path / "disk", **sizes) as later:
        later.wait_for(lambda: later.num_on_disk >= NUM_CACHED // 16)
        read = later.ask()
        assert read.num_cached_tokens == NUM_CACHED
        assert_equal([read], [computed])


def test_damage_a_salt_and_a_reset(tmp_path: Path) -> None:
    model, disk = builtin_model_folder(), tmp_path / "disk"
    with running(model, disk, kv_disk_size=1.0) as engine:
        host = engine.engine.executor.started.host_tier
        assert host is not None
        computed = engine.write()
        secret = engine.ask(OTHERS[0], cache_salt="secret")
        engine.press()
        assert engine.ask(OTHERS[0], cache_salt="secret").num_cached_tokens == NUM_CACHED
    (data,) = disk.rglob("*.data")
    content = bytearray(data.read_bytes())
    content[host.page_bytes * 5 + 100] ^= 1  # in the sixth block
    data.write_bytes(content)
    with running(model, disk, kv_disk_size=1.0) as later:
        later.wait_for(lambda: later.num_on_disk > 0)
        again = later.ask(OTHERS[0], cache_salt="secret")
        assert again.num_cached_tokens == 0
        assert_equal([again], [secret])
        read = later.ask()
        assert read.num_cached_tokens == 5 * 16, "up to the damaged block"
        assert_equal([read], [computed])
        later.engine.core.operate(ResetPrefixCache(time.time()))
        later.engine.core.step()
        assert later.num_on_disk == 0
        assert later.ask().num_cached_tokens == 0
        later.wait_for(lambda: not [*disk.rglob("*.data")])


def test_blocks_come_from_disk_when_host_memory_has_lost_them(tmp_path: Path) -> None:
    model, disk = builtin_model_folder(), tmp_path / "disk"
    with running(model, disk) as engine:
        host = engine.engine.executor.started.host_tier
        assert host is not None
        size = 60 * host.page_bytes / 2**30
    with running(model, disk, kv_offloading_size=size) as engine:
        computed = engine.write()
        for salt in range(6):
            engine.ask([(11 * index + salt) % 190 + 5 for index in range(150)])
        read = engine.ask()
        assert read.num_cached_tokens == NUM_CACHED
        assert_equal([read], [computed])
        occupancy = engine.engine.core.counters().cache.disk
        assert occupancy is not None
        assert occupancy.reads.num_fetched_tokens > 0


def test_a_folder_or_a_size_that_cannot_be_used_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    model = builtin_model_folder()
    with pytest.raises(ValueError, match=r"kv_disk_path: .*file cannot be used"), running(model, tmp_path / "file"):
        pass
    with (
        pytest.raises(ValueError, match="kv_disk_size must be at least"),
        running(model, tmp_path / "disk", kv_disk_size=1e-5),
    ):
        pass
