"""Movers in threads of the test, over arenas of their own, driven by the messages that a worker sends."""

import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from threading import Thread
from typing import Any

import msgspec

from proa_engine.config import PeerTls
from proa_engine.core.kv.mover import Adopted, Fetched, FetchJob
from proa_engine.core.types import NO_STATE, DiskCounts, StoredCheckpoint
from proa_engine.framing import FrameReader, encode
from proa_engine.memory.arena_memory import ArenaMemory, anonymous_memory
from proa_engine.mover.arena import Arena
from proa_engine.mover.frames import BlocksRequest, encode_request
from proa_engine.mover.layout import ArenaLayout
from proa_engine.mover.messages import (
    Adopt,
    AdoptionProgress,
    Alive,
    Cancel,
    Copied,
    DiskSettings,
    Fetch,
    Init,
    Listening,
    Log,
    OnDisk,
    Progress,
    Refused,
    Reset,
    ToMover,
    ToWorker,
    WriteBlocks,
)
from proa_engine.mover.process import Mover
from proa_engine.option_groups import LOOPBACK

LAYOUT = ArenaLayout(num_pages=20, page_bytes=5000, num_states=3, state_bytes=(700, 64))
FINGERPRINT = bytes(range(32))


def hashes(count: int, salt: int = 0) -> list[bytes]:
    """Names of blocks in a row."""
    return [bytes([salt, number]) * 8 for number in range(count)]


def repeated(content: bytes, length: int = LAYOUT.page_bytes) -> bytes:
    """What `RunningMover.write` makes of a content."""
    return (content * (length // len(content) + 1))[:length]


@dataclass
class RunningMover:
    """A mover, and its arena as the worker has it."""

    arena: Arena
    control: socket.socket
    port: int
    serial: int = 0
    on_disk: set[bytes] = field(default_factory=set)
    checkpoints_on_disk: set[bytes] = field(default_factory=set)
    counts: DiskCounts = field(default_factory=DiskCounts)
    lines: list[str] = field(default_factory=list)
    _reader: FrameReader[ToWorker] = field(repr=False, kw_only=True)

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def send(self, message: ToMover) -> None:
        self.control.sendall(encode(message))

    def begin_store(self, *units: int) -> None:
        """Do what a worker does before copies that write these units."""
        self.serial += 1
        for unit in units:
            self.arena._serials[unit] = self.serial

    def write(self, unit: int, content: bytes) -> None:
        for buffer in self.arena.buffers(unit):
            buffer[:] = repeated(content, len(buffer))

    def end_store(self, blocks: Sequence[tuple[int, bytes]] = (), checkpoints: Sequence[StoredCheckpoint] = ()) -> None:
        self.send(Copied(self.serial, tuple(blocks), tuple(checkpoints)))

    def store(self, chain: Sequence[bytes], first_page: int = 0) -> None:
        """Store blocks of table 0, each with its hash as content, in pages in a row."""
        blocks = [(first_page + index, block_hash) for index, block_hash in enumerate(chain)]
        self.begin_store(*(page for page, _ in blocks))
        for page, block_hash in blocks:
            self.write(page, block_hash)
        self.end_store(blocks)

    def store_checkpoint(self, chain: Sequence[bytes]) -> None:
        """Store a chain in the first pages, and a checkpoint behind it, with tails of two blocks and one, and a
        state."""
        self.store(chain)
        tails = [[(10, chain[-2]), (11, chain[-1])], [(12, chain[-1])]]
        state = self.arena.unit_of_slot(1)
        self.begin_store(10, 11, 12, state)
        for unit, content in ((10, b"tail 0"), (11, b"tail 1"), (12, b"other tail"), (state, b"state")):
            self.write(unit, content)
        self.end_store(checkpoints=[StoredCheckpoint(chain[-1], tails, state=1)])

    def fetch(self, job: FetchJob) -> None:
        self.send(Fetch(job))

    def fetched(self) -> Fetched:
        """Wait for the end of a job."""
        while True:
            message = self._reader.read()
            assert isinstance(message, Progress | Alive | OnDisk | Log), message
            match message:
                case Progress(fetched):
                    return fetched
                case OnDisk():
                    self._take(message)
                case Log(line):
                    self.lines.append(line)

    def write_to_disk(self, blocks: Sequence[bytes], checkpoint: bytes = b"") -> None:
        self.send(WriteBlocks(tuple(blocks), checkpoint, self.serial))

    def wait_for_disk(self, is_met: Callable[["RunningMover"], bool]) -> None:
        """Wait until what the disk has, or how often it failed, is as expected."""
        while not is_met(self):
            message = self._reader.read()
            assert isinstance(message, Alive | OnDisk | Log), message
            if isinstance(message, OnDisk):
                self._take(message)
            if isinstance(message, Log):
                self.lines.append(message.line)

    def _take(self, message: OnDisk) -> None:
        message.changes.blocks.apply(self.on_disk)
        message.changes.checkpoints.apply(self.checkpoints_on_disk)
        self.counts = message.changes.counts

    def adopted(self) -> list[Adopted]:
        """Let the mover verify what an earlier engine has left."""
        self.send(Adopt())
        ranges: list[Adopted] = []
        while not ranges or not ranges[-1].is_done:
            message = self._reader.read()
            assert isinstance(message, AdoptionProgress | Alive | OnDisk | Log), message
            if isinstance(message, AdoptionProgress):
                ranges.append(message.adopted)
        return ranges

    def content(self, unit: int) -> bytes:
        return b"".join(bytes(buffer) for buffer in self.arena.buffers(unit))

    def cancel(self, job_id: int) -> None:
        self.send(Cancel(job_id))

    def reset(self, since: float) -> None:
        self.send(Reset(since, self.serial))


@contextmanager
def running_mover(
    *,
    layout: ArenaLayout = LAYOUT,
    fingerprint: bytes = FINGERPRINT,
    rank: int = 0,
    num_ranks: int = 1,
    since: float = 100.0,
    disk: DiskSettings | None = None,
    memory: ArenaMemory | None = None,
    tls: PeerTls | None = None,
    sources: Sequence[str] = LOOPBACK,
) -> Iterator[RunningMover]:
    """`memory` None: anonymous, of this layout."""
    with ExitStack() as stack:
        ours, theirs = socket.socketpair()
        stack.enter_context(ours)
        stack.enter_context(theirs)
        if memory is None:
            memory = replace(anonymous_memory(layout), since=since)
            stack.callback(memory.close)
        layout, descriptor = memory.layout, memory.descriptor
        thread = Thread(target=Mover(theirs, descriptor).run, daemon=True)
        thread.start()
        init = Init(
            layout=layout,
            host="127.0.0.1",
            port=0,
            rank=rank,
            num_ranks=num_ranks,
            fingerprint=fingerprint,
            since=memory.since,
            epoch=memory.epoch,
            disk=disk,
            tls=tls,
            sources=tuple(sources),
        )
        ours.sendall(encode(init))
        reader: FrameReader[ToWorker] = FrameReader(ours, msgspec.msgpack.Decoder(ToWorker))
        answer = reader.read()
        assert not isinstance(answer, Refused), answer
        assert isinstance(answer, Listening)
        yield RunningMover(Arena(descriptor, layout), ours, answer.port or 0, _reader=reader)
        ours.shutdown(socket.SHUT_RDWR)
        thread.join(5)
        assert not thread.is_alive()


def make_job(
    source: RunningMover | str,
    chain: Sequence[bytes],
    *,
    job_id: int = 1,
    num_held: int = 0,
    first_page: int = 0,
    tails: Sequence[Sequence[int]] = (),
    state: int = NO_STATE,
    needs_checkpoint: bool = False,
    copied: int = 0,
    wait_ms: int = 20_000,
    max_ms: int = 60_000,
    since: float = 0.0,
    num_ranks: int = 1,
) -> FetchJob:
    """A job that fills pages in a row."""
    address = source if isinstance(source, str) else source.address
    return FetchJob(
        job_id=job_id,
        addresses=(address,) * num_ranks,
        chain=tuple(chain),
        num_held=num_held,
        pages=tuple(range(first_page, first_page + len(chain) - num_held)),
        needs_checkpoint=needs_checkpoint,
        tails=tuple(map(tuple, tails)),
        state=state,
        copied=copied,
        wait_ms=wait_ms,
        max_ms=max_ms,
        since=since,
    )


def blocks_request(chain: Sequence[bytes], *, needs_checkpoint: bool = False, **changes: Any) -> bytes:
    """What a mover of the fingerprint sends for a job, with some fields of `BlocksRequest` changed."""
    request = BlocksRequest(
        fingerprint=FINGERPRINT,
        rank=0,
        num_ranks=1,
        num_blocks=len(chain),
        num_held=0,
        needs_checkpoint=needs_checkpoint,
        wait_ms=20_000,
        max_ms=60_000,
        since=0.0,
    )
    return encode_request(request._replace(**changes), chain)
