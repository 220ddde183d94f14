"""Client: runs fetches from other engines, on a thread for each, straight into the arena."""

import socket
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from socket import SocketIO
from threading import Lock, Thread

from proa_engine.core.mover import Fetched, FetchJob
from proa_engine.core.types import NO_STATE, StoredCheckpoint
from proa_engine.mover.arena import Arena
from proa_engine.mover.frames import (
    BadFrame,
    BlocksRequest,
    Header,
    Kind,
    Refusal,
    encode_request,
    read_content,
    read_header,
)
from proa_engine.mover.index import STATE, Filled, Index, Key
from proa_engine.mover.messages import Init
from proa_engine.tls import Tls

_BUFFER_BYTES = 1 << 18  # of small reads; larger ones go straight into the arena
_GRACE_SECONDS = 1.0  # beyond `wait_ms`, after which the source ends its answer itself


@dataclass(slots=True)
class _Received(Filled):
    """What a job has received, and what of its checkpoint, which comes last."""

    tails: dict[Key, tuple[int, int]] = field(default_factory=dict)  # by table and hash: place and page
    has_state: bool = False


class Client:
    """Runs jobs. `on_end` is called once for each, from its thread, when nothing is written any more. `tls` None: in
    plaintext."""

    def __init__(
        self,
        arena: Arena,
        index: Index,
        init: Init,
        on_end: Callable[[Fetched], None],
        tls: Tls | None = None,
    ) -> None:
        self._arena = arena
        self._index = index
        self._init = init
        self._tls = tls
        self._on_end = on_end
        self._lock = Lock()
        self._connections: dict[int, socket.socket | None] = {}  # by job id; None: not connected yet

    def fetch(self, job: FetchJob) -> None:
        """Start a job."""
        self._connections[job.job_id] = None
        arguments = (job, self._index.num_resets)
        Thread(target=self._run, args=arguments, name=f"proa-mover-fetch-{job.job_id}", daemon=True).start()

    def cancel(self, job_id: int) -> None:
        """End a job soon, if it has not ended."""
        with self._lock:
            connection = self._connections.pop(job_id, None)
            if connection is not None:
                with suppress(OSError):
                    # An `SSLSocket` must not be shut down beside a thread that reads from it.
                    socket.socket.shutdown(connection, socket.SHUT_RDWR)

    def _run(self, job: FetchJob, num_resets: int) -> None:
        received, error = _Received(), ""
        try:
            if not self._index.clear_for(job):
                raise BadFrame("copies of earlier steps did not end in time")
            self._receive(job, received)
        except (OSError, BadFrame) as problem:
            error = str(problem) or type(problem).__name__
        except Exception as problem:  # a job that does not end would keep its requests waiting
            error = f"{type(problem).__name__}: {problem}"
        self._index.add_received(received.units, received.checkpoint, num_resets)
        with self._lock:
            self._connections.pop(job.job_id, None)
        self._on_end(received.end(job.job_id, error))

    def _receive(self, job: FetchJob, received: _Received) -> None:
        """Receive the job's blocks. Raises `OSError` or `BadFrame`; what is whole is in `received`."""
        init = self._init
        if len(job.addresses) != init.num_ranks:
            raise BadFrame(f"the source has {len(job.addresses)} ranks, this engine {init.num_ranks}")
        wait = job.wait_ms / 1000 + _GRACE_SECONDS
        host, _, port = job.addresses[init.rank].rpartition(":")
        with socket.create_connection((host.strip("[]"), int(port)), timeout=wait) as connection:
            with self._lock:
                if job.job_id not in self._connections:
                    raise BadFrame("the request was aborted")
                self._connections[job.job_id] = connection
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                self._exchange(connection, job, received)
                return
            with self._tls.connect(connection) as wrapped:
                with self._lock:
                    if job.job_id not in self._connections:
                        raise BadFrame("the request was aborted")
                    self._connections[job.job_id] = wrapped
                self._exchange(wrapped, job, received)

    def _exchange(self, connection: socket.socket, job: FetchJob, received: _Received) -> None:
        """Send the job's request and take the answer."""
        connection.sendall(encode_request(_request(job, self._init)))
        with BufferedReader(SocketIO(connection, "r"), _BUFFER_BYTES) as stream:
            while (header := read_header(stream)).kind != Kind.END:
                self._take(stream, header, job, received)

    def _take(self, stream: "BufferedReader[SocketIO]", header: Header, job: FetchJob, received: _Received) -> None:
        """Take a frame. Raises `BadFrame` for one that the job has no place for."""
        match header.kind:
            case Kind.PAGE if header.table == 0:
                column = job.num_held + received.num_blocks
                if header.column != column or column >= len(job.chain) or header.block_hash != job.chain[column]:
                    raise BadFrame("a block came that was not asked for")
                self._read(stream, header, (0, header.block_hash), job.pages[received.num_blocks], received)
                received.num_blocks += 1
            case Kind.PAGE:
                if header.table > len(job.tails) or header.column >= len(job.tails[header.table - 1]):
                    raise BadFrame("a tail came that was not asked for")
                page, key = job.tails[header.table - 1][header.column], (header.table, header.block_hash)
                self._read(stream, header, key, page, received)
                received.tails[key] = header.column, page
            case Kind.STATE if job.state != NO_STATE:
                unit = self._arena.unit_of_slot(job.state)
                self._read(stream, header, (STATE, header.block_hash), unit, received)
                received.has_state = True
            case Kind.CHECKPOINT:
                received.checkpoint = _checkpoint(header, job, received)
            case Kind.REFUSED:
                raise BadFrame(_refusal(header.code))
            case _:
                raise BadFrame(f"a frame of kind {header.kind} came")

    def _read(
        self, stream: "BufferedReader[SocketIO]", header: Header, key: Key, unit: int, received: _Received
    ) -> None:
        """Read a unit's content and check it."""
        read_content(stream, self._arena.buffers(unit), header)
        if self._arena.checksum(unit) != header.checksum:
            raise BadFrame("a block's checksum is wrong")
        received.units.append((key, unit, header.checksum))
        received.num_bytes += header.length


def _request(job: FetchJob, init: Init) -> BlocksRequest:
    return BlocksRequest(
        fingerprint=init.fingerprint,
        rank=init.rank,
        num_ranks=init.num_ranks,
        chain=b"".join(job.chain),
        num_held=job.num_held,
        needs_checkpoint=job.needs_checkpoint,
        wait_ms=job.wait_ms,
        since=job.since,
    )


def _checkpoint(header: Header, job: FetchJob, received: _Received) -> StoredCheckpoint:
    """Return the checkpoint whose tails and state were received. Raises `BadFrame` if any is missing."""
    num_columns = header.column
    chain = job.chain[:num_columns]
    if not 0 < num_columns <= job.num_held + received.num_blocks or header.block_hash != chain[-1]:
        raise BadFrame("a checkpoint came that was not asked for")
    tails = []
    for table, pages in enumerate(job.tails, start=1):
        of_table = [received.tails.get((table, block_hash)) for block_hash in chain[-len(pages) :]]
        places = [(len(of_table) - 1 - index, page) for index, page in enumerate(pages[: len(of_table)][::-1])]
        if of_table != places:
            raise BadFrame("a checkpoint came without all its tails")
        tails.append([(page, block_hash) for (_, page), block_hash in zip(places, chain[-len(pages) :], strict=True)])
    if received.has_state != (job.state != NO_STATE):
        raise BadFrame("a checkpoint came without its state")
    return StoredCheckpoint(header.block_hash, tails, job.state)


def _refusal(code: int) -> str:
    return Refusal(code).sentence if code in list(Refusal) else f"the source refused with code {code}"
