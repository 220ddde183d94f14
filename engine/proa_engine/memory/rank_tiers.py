"""RankTiers: what a rank keeps below its device's KV cache: pages in host memory, and a mover, which exchanges them
with other engines, a disk and the next engine."""

import logging
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from proa_engine.config import EngineConfig
from proa_engine.core.types import Copies
from proa_engine.memory.arena_memory import ArenaMemory, anonymous_memory, open_file
from proa_engine.memory.cache_plan import CacheMemory, CachePlan
from proa_engine.memory.host_arena import HostArena, arena_layout
from proa_engine.memory.kv_cache import CacheSizes
from proa_engine.memory.mover_process import MoverProcess
from proa_engine.mover.disk import MIN_SEGMENTS
from proa_engine.mover.disk_slots import delete_abandoned, take_slot
from proa_engine.mover.layout import ArenaLayout
from proa_engine.mover.messages import DiskSettings, FromCore, Init, ToCore

_log = logging.getLogger(__name__)


class RankTiers(Protocol):
    """They live as long as the rank, also while it sleeps."""

    @property
    def load_rate(self) -> float:
        """Bytes a second from host memory to the device, as measured."""
        ...

    def begin_step(self, copies: Copies, memory: CacheMemory) -> None:
        """Start the copies of the next step, and wait for those of the step before. Device work, before each step."""
        ...

    def start_mover(self, on_message: Callable[[ToCore], None]) -> int | None:
        """Start the mover, if the configuration has one. Returns the port on which it serves other engines, None if it
        serves none. `on_message` is called, from any thread, with what it sends to the core."""
        ...

    def send(self, message: FromCore) -> None:
        """Pass a message on to the mover, from any thread."""
        ...

    def close(self) -> None: ...


class NoMover:
    """The mover before it is started, or of a host tier that is of no use to others."""

    def send(self, message: FromCore) -> None:
        raise AssertionError("only an engine with movers sends them messages")

    def copied(self, copies: Copies) -> None:
        pass

    def close(self) -> None:
        pass


class NoRankTiers:
    """Those of an engine without a host tier."""

    load_rate = 0.0

    def begin_step(self, copies: Copies, memory: CacheMemory) -> None:
        pass

    def start_mover(self, on_message: Callable[[ToCore], None]) -> int | None:
        return None

    def send(self, message: FromCore) -> None:
        raise AssertionError("only an engine with movers sends them messages")

    def close(self) -> None:
        pass


class HostTiers:
    """A host tier, and the mover of a configuration that has movers.

    `fingerprint` is what engines must have in common to exchange blocks. `disk_folder` is that of all ranks, empty if
    there is no disk.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        on_device: CacheMemory,
        memory: ArenaMemory,
        *,
        fingerprint: bytes,
        disk_folder: str,
    ) -> None:
        """Overwrites blocks of the device: there must have been no step. Raises `ValueError`."""
        self._config = config
        self._rank = rank
        self._fingerprint = fingerprint
        self._disk_folder = disk_folder
        self.mover: MoverProcess | NoMover = NoMover()
        self.arena = HostArena(on_device, memory, self._on_copied if config.kv_tiers.has_movers else None)
        self.load_rate = self.arena.measure_load_rate(on_device)

    def begin_step(self, copies: Copies, memory: CacheMemory) -> None:
        self.arena.begin_step(copies, memory)

    def start_mover(self, on_message: Callable[[ToCore], None]) -> int | None:
        config, memory = self._config, self.arena.memory
        if not config.kv_tiers.has_movers:
            return None
        host, port = self._transfer_address()
        init = Init(
            layout=memory.layout,
            host=host,
            port=port,
            rank=self._rank,
            num_ranks=config.parallel.tensor_parallel_size,
            fingerprint=self._fingerprint,
            since=memory.since,
            epoch=memory.epoch,
            disk=self._disk_settings(memory.layout) if self._disk_folder else None,
            tls=config.peer_tls,
            sources=() if config.kv_tiers.kv_transfer_address is None else config.kv_tiers.kv_transfer_sources,
        )
        self.mover = MoverProcess(init, memory.descriptor, on_message, _log.warning)
        return self.mover.port

    def send(self, message: FromCore) -> None:
        self.mover.send(message)

    def close(self) -> None:
        self.mover.close()
        self.arena.close()

    def _on_copied(self, copies: Copies) -> None:
        self.mover.copied(copies)

    def _disk_settings(self, layout: ArenaLayout) -> DiskSettings:
        """Return this rank's part of the disk. Raises `ValueError`."""
        config = self._config
        num_bytes = int(config.kv_tiers.kv_disk_size * 2**30) // config.parallel.tensor_parallel_size
        least = MIN_SEGMENTS * max(layout.page_bytes, sum(layout.state_bytes))
        if num_bytes < least:
            least_gib = least * config.parallel.tensor_parallel_size / 2**30
            raise ValueError(f"kv_disk_size must be at least {least_gib:.3f} GiB, {MIN_SEGMENTS} blocks of each rank")
        return DiskSettings(
            folder=str(Path(self._disk_folder) / f"rank-{self._rank}"),
            num_bytes=num_bytes,
            bytes_per_second=config.kv_tiers.kv_disk_write_mb_per_second * 1e6,
        )

    def _transfer_address(self) -> tuple[str, int | None]:
        """Return the host and port on which the rank's mover listens. 0: any free port; None: it does not listen."""
        address = self._config.kv_tiers.kv_transfer_address
        if address is None:
            return "", None
        host, _, port = address.rpartition(":")
        return host.strip("[]"), int(port) + self._rank if int(port) else 0


def make_rank_tiers(
    config: EngineConfig,
    rank: int,
    sizes: CacheSizes,
    plan: CachePlan,
    on_device: CacheMemory,
    log: Callable[[str], None],
    *,
    fingerprint: bytes,
    disk_folder: str,
) -> RankTiers:
    """Return the rank's tiers of these sizes, beside its KV cache `on_device`; the mover is not started.

    Their memory is a file if the configuration names a folder for it. Raises `ValueError`.
    """
    if not sizes.num_host_pages:
        return NoRankTiers()
    folder = config.kv_tiers.kv_offloading_path
    layout = arena_layout(
        on_device,
        sizes.num_host_pages,
        sizes.num_host_states,
        tail_columns=plan.tail_columns,
        has_directory=folder is not None,
    )
    if folder is None:
        memory = anonymous_memory(layout)
    else:
        memory = open_file(Path(folder), rank, layout, fingerprint)
        found = "continues with what an earlier engine has left" if memory.is_adopted else "is empty"
        log(f"host memory in {folder} {found}")
    return HostTiers(config, rank, on_device, memory, fingerprint=fingerprint, disk_folder=disk_folder)


@contextmanager
def disk_folder(config: EngineConfig, fingerprint: bytes, log: Callable[[str], None]) -> Iterator[str]:
    """Choose a folder in `kv_disk_path` for the ranks of this engine, and lock it within the context. Empty if there is
    no disk. Raises `ValueError`."""
    if config.kv_tiers.kv_disk_path is None:
        yield ""
        return
    path = Path(config.kv_tiers.kv_disk_path)
    try:
        for abandoned in delete_abandoned(path, time.time()):
            log(f"kv_disk_path: deleted {abandoned}, which no engine has used for a week")
        folder, lock = take_slot(path, fingerprint)
    except OSError as error:
        raise ValueError(f"kv_disk_path: {path} cannot be used: {error.strerror or error}") from error
    log(f"KV cache on disk in {folder}")
    try:
        yield str(folder)
    finally:
        os.close(lock)
