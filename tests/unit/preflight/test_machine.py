"""Whether the machine has the GPUs, the memory and the addresses that an engine needs."""

import ctypes
import socket
from pathlib import Path
from typing import Any

import pytest

from proa_engine.config import EngineConfig
from proa_engine.memory.host import HostMemory
from proa_engine.memory.requirements import check_gpu_weights
from proa_engine.option_groups import KvTiers
from proa_engine.preflight import check, check_start
from proa_engine.preflight.devices import Gpus, check_gpus, read_gpus, runs_on_cpu, visible
from proa_engine.preflight.ports import check_address, why_unusable

GIB = 2**30
TWO_GPUS = Gpus((80 * GIB, 80 * GIB))


class FakeNvml:
    """NVML with two GPUs, of which the second may be divided. Functions return 0 for success, as the library's."""

    def __init__(self, *, is_divided: bool = False, init: int = 0) -> None:
        self._is_divided = is_divided
        self.nvmlInit_v2 = lambda: init
        self.nvmlShutdown = lambda: 0

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:
        count._obj.value = 2
        return 0

    def nvmlDeviceGetHandleByIndex_v2(self, number: Any, handle: Any) -> int:
        handle._obj.value = 1 + number.value
        return 0

    def nvmlDeviceGetMigMode(self, handle: Any, current: Any, pending: Any) -> int:
        current._obj.value = int(self._is_divided and handle.value == 2)
        return 0 if handle.value == 2 else 3  # NVML_ERROR_NOT_SUPPORTED

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:
        memory._obj.total = handle.value * 40 * GIB
        return 0


def test_gpus_are_those_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    def read(nvml: FakeNvml, **environment: str) -> Gpus | None:
        monkeypatch.setattr(ctypes, "CDLL", lambda name: nvml)
        return read_gpus(environment)

    assert read(FakeNvml()) == Gpus((80 * GIB, 40 * GIB))
    assert read(FakeNvml(), CUDA_VISIBLE_DEVICES="1") == Gpus((80 * GIB,))
    assert read(FakeNvml(), CUDA_VISIBLE_DEVICES="") == Gpus(())
    assert read(FakeNvml(is_divided=True)) is None
    assert read(FakeNvml(is_divided=True), CUDA_VISIBLE_DEVICES="0") == Gpus((40 * GIB,))
    assert read(FakeNvml(init=9)) is None
    # CUDA's first one may be NVML's second.
    assert read(FakeNvml(), CUDA_VISIBLE_DEVICES="0") == Gpus((80 * GIB,))
    assert read(FakeNvml(), CUDA_VISIBLE_DEVICES="0", CUDA_DEVICE_ORDER="PCI_BUS_ID") == Gpus((40 * GIB,))


@pytest.mark.parametrize(
    ("variable", "numbers"),
    [
        (None, [0, 1, 2, 3]),
        ("2,0", [2, 0]),
        ("1, 7, 2", [1]),  # as CUDA does: what follows a GPU that does not exist is not used
        ("-1", []),
        ("", []),
        ("GPU-8932f937", None),
        ("MIG-8932f937", None),
    ],
)
def test_visible_gpus_are_those_of_cuda(variable: str | None, numbers: list[int] | None) -> None:
    found = visible(variable, 4)

    assert (None if found is None else list(found)) == numbers


def test_too_few_gpus_are_refused_and_unknown_ones_are_not() -> None:
    check_gpus("cuda", 2, TWO_GPUS)
    check_gpus("cuda", 4, None)
    check_gpus("cpu", 4, TWO_GPUS)
    with pytest.raises(
        ValueError, match=r"needs 4 GPUs here, one for each rank, but this process has 2.*lower tensor_"
    ):
        check_gpus("cuda", 4, TWO_GPUS)
    with pytest.raises(ValueError, match="needs 1 GPUs here, one for each rank, but this process has 0"):
        check_gpus("cuda", 1, Gpus(()))


def test_an_engine_runs_on_the_cpu_where_there_is_no_gpu() -> None:
    assert runs_on_cpu("cpu", TWO_GPUS)
    assert runs_on_cpu("auto", Gpus(()))
    assert not runs_on_cpu("cuda", None)


def test_weights_that_no_gpu_has_room_for_are_refused() -> None:
    check_gpu_weights(70 * GIB, 80 * GIB, 0.9)
    with pytest.raises(ValueError, match=r"at least 75\.00 GiB on a rank, but a GPU here has 80\.00 GiB.*allows 90%"):
        check_gpu_weights(75 * GIB, 80 * GIB, 0.9)


def test_weights_are_compared_with_what_the_gpus_of_the_ranks_may_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second GPU is one for a display. The built-in model has a decoder of about 4 MB."""
    monkeypatch.setattr(check, "check_driver", lambda: None)

    def start(memory: int, **options: Any) -> None:
        monkeypatch.setattr(check, "read_gpus", lambda: Gpus((memory, 1)))
        check_start(EngineConfig.from_options(model="builtin", device="cuda", **options))

    start(40 * GIB)
    with pytest.raises(ValueError, match="weights take at least"):
        start(40 * GIB, tensor_parallel_size=2)
    with pytest.raises(ValueError, match="gpu_memory_utilization allows 1%"):
        start(100 * 2**20, gpu_memory_utilization=0.01)
    # With a size of its own for the cache, the utilization has no effect.
    start(100 * 2**20, gpu_memory_utilization=0.01, kv_cache_memory_bytes=2**20)
    start(100 * 2**20, gpu_memory_utilization=0.01, num_gpu_blocks_override=100)


def test_weights_that_the_host_has_no_room_for_are_refused_before_they_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(check, "read_memory", lambda: HostMemory(limit=2 * 2**20, available=64 * GIB, process=0))

    with pytest.raises(ValueError, match=r"the model's weights take .* on this rank, but it has 0\.00 GiB of memory"):
        check_start(EngineConfig(model="builtin", device="cpu"))


def test_memory_that_an_earlier_engine_has_left_to_this_one_is_room_for_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(check, "read_memory", lambda: HostMemory(limit=None, available=2**20, process=0))
    (tmp_path / "rank-0.arena").write_bytes(bytes(32 * 2**20))

    check_start(
        EngineConfig(
            model="builtin", device="cpu", kv_tiers=KvTiers(kv_offloading_size=1, kv_offloading_path=str(tmp_path))
        )
    )


def test_a_folder_for_compiled_kernels_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cannot be kept in .*/file \(--compile-cache\): File exists"):
        check_start(EngineConfig(model="builtin", compile_cache=str(tmp_path / "file")))


def test_a_folder_for_compiled_kernels_is_made_and_on_a_cpu_without_effect(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    check_start(EngineConfig(model="builtin", device="cpu", compile_cache=str(tmp_path / "a" / "b")))
    assert (tmp_path / "a" / "b").is_dir()
    assert "compile_cache has no effect on a CPU" in caplog.text


def test_an_address_in_use_or_of_another_machine_is_refused_with_its_flag() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=rf"cannot listen on 127.0.0.1:{port} \(--port\): another program listens"):
            check_address("127.0.0.1", port, "--port")
        config = EngineConfig(
            model="builtin", kv_tiers=KvTiers(kv_offloading_size=1, kv_transfer_address=f"127.0.0.1:{port}")
        )
        with pytest.raises(ValueError, match=r"\(--kv-transfer-address\): another program listens there"):
            check_start(config)

    check_address("127.0.0.1", port, "--port")
    check_address("", port, "--port")
    assert why_unusable("192.0.2.1", port) == "192.0.2.1 is not an address of this machine"
    assert why_unusable("no.such.host.invalid", port) == (
        "no.such.host.invalid is neither an address nor a name that can be resolved"
    )
