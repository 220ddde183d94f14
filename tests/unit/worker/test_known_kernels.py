"""A start that finds the list of an earlier one needs no program that finds out which kernels to compile."""

import errno
import os
import pwd
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from proa.options import flat, flat_hints
from proa_engine.config import EngineConfig
from proa_engine.option_groups import KvTiers
from proa_engine.worker.compile_pool import CompilePool
from proa_engine.worker.known_kernels import UNRELATED, GpuKind, KnownKernels, _triton_cache
from support.tiny_models import make_tiny_model

KERNELS = ["one", "two"]
H100 = GpuKind(capability=90, multiprocessors=132)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Triton's cache, in which an earlier start has compiled two kernels."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    for kernel in KERNELS:
        (folder / kernel).mkdir(parents=True)
    return folder


@pytest.fixture
def config(tmp_path: Path) -> EngineConfig:
    config = EngineConfig(model=str(make_tiny_model(tmp_path)))
    KnownKernels(config).remember(H100, KERNELS)
    return config


def test_a_start_finds_the_list_of_an_earlier_one_for_the_same_gpu(config: EngineConfig) -> None:
    known = KnownKernels(config)
    assert known.may_be_complete()
    assert known.count(H100) == 2
    assert known.count(GpuKind(80, 108)) is None
    assert known.count(GpuKind(90, 78)) is None, "tilings depend on the multiprocessors"


def test_a_model_may_have_links_to_nothing(config: EngineConfig) -> None:
    (Path(config.model) / "missing.json").symlink_to("nowhere")
    assert KnownKernels(config).count(H100) == 2


@pytest.mark.parametrize(
    "other", [{"dtype": "float16"}, {"max_num_seqs": 7}, {"enable_lora": True}, {"tensor_parallel_size": 2}]
)
def test_another_configuration_has_its_own_list(config: EngineConfig, other: dict[str, Any]) -> None:
    known = KnownKernels(EngineConfig.from_options(**flat(config) | other))
    assert not known.may_be_complete()
    assert known.count(H100) is None


def test_another_model_has_its_own_list_and_an_equal_one_elsewhere_has_not(
    config: EngineConfig, tmp_path: Path
) -> None:
    (tmp_path / "equal").mkdir()
    (tmp_path / "other").mkdir()
    equal, other = make_tiny_model(tmp_path / "equal"), make_tiny_model(tmp_path / "other", hidden_size=80)
    assert KnownKernels(replace(config, model=str(equal))).count(H100) == 2
    assert KnownKernels(replace(config, model=str(other))).count(H100) is None


@pytest.mark.parametrize("name", ["PROA_DEPENDENT_LAUNCH", "PROA_L2_PREFETCH", "TRITON_PTXAS_PATH"])
def test_variables_that_change_kernels_are_a_part_of_the_key(
    config: EngineConfig, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, "0")
    assert KnownKernels(config).count(H100) is None


def test_a_list_of_a_kernel_that_was_deleted_is_not_used(config: EngineConfig, cache: Path) -> None:
    (cache / "two").rmdir()
    assert KnownKernels(config).count(H100) is None


@pytest.mark.parametrize("damage", [b"", b"\0" * 60, b"\xff\xfe", b"x" * 300])
def test_a_list_that_a_crash_of_the_machine_damaged_is_not_used(
    config: EngineConfig, cache: Path, damage: bytes
) -> None:
    (path,) = (cache / "proa").iterdir()
    path.write_bytes(damage)
    assert KnownKernels(config).count(H100) is None


def test_a_cache_that_was_moved_is_not_used(config: EngineConfig, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.rename(cache.with_name("moved"))))
    assert KnownKernels(config).count(H100) is None


def test_fields_that_decide_no_kernel_exist_and_do_not_change_the_list(config: EngineConfig) -> None:
    assert flat_hints(EngineConfig).keys() >= UNRELATED
    moved = replace(config, kv_tiers=KvTiers(kv_offloading_size=1.0, kv_transfer_address="10.0.0.1:1"))
    KnownKernels(moved).remember(H100, KERNELS)
    other = replace(moved, kv_tiers=replace(moved.kv_tiers, kv_transfer_address="10.0.0.2:2"), seed=3)
    assert KnownKernels(other).count(H100) == 2


def test_a_folder_that_cannot_be_written_keeps_no_list(config: EngineConfig, cache: Path) -> None:
    known = KnownKernels(config)
    known.forget(H100)
    (cache / "proa").rmdir()
    (cache / "proa").write_text("a file")
    known.remember(H100, KERNELS)
    assert known.count(H100) is None


def test_without_a_home_triton_s_cache_is_in_a_relative_folder_as_triton_has_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(_: int) -> NoReturn:
        raise KeyError("uid not found")

    for name in ("TRITON_CACHE_DIR", "TRITON_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", refuse)
    assert _triton_cache() == Path("~/.triton/cache")


def test_a_full_disk_leaves_no_file(config: EngineConfig, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = KnownKernels(config)
    known.forget(H100)

    def fill(path: Path, text: str) -> None:
        path.touch()
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    monkeypatch.setattr(Path, "write_text", fill)
    known.remember(H100, KERNELS)
    assert not list((cache / "proa").iterdir())


def test_a_pool_with_a_list_starts_no_program_until_a_kernel_is_missed(
    config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("a program was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    pool = CompilePool(config)
    pool.compile(H100)
    assert pool.wait() == "compiled 0 kernels in 0.0 s, 2 of 2 were in the cache"
    pool.note("kernel", "one", True)
    assert KnownKernels(config).count(H100) == 2
    pool.note("kernel", "three", False)  # the worker has compiled a kernel
    assert KnownKernels(config).count(H100) is None
    pool.close()


def test_a_pool_starts_its_program_late_if_the_gpu_is_another_one(config: EngineConfig) -> None:
    pool = CompilePool(config, max_seconds=0.0)
    assert pool._process is None
    pool.compile(GpuKind(80, 108))
    assert pool._process is not None
    pool.close()
