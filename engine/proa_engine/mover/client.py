"""Client: runs fetches from other engines, on a thread for each, straight into the arena."""

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from threading import Lock, Thread

from proa_engine.core.kv.mover import Fetched, FetchJob
from proa_engine.core.types import NO_STATE, StoredCheckpoint
from proa_engine.mover.arena import Arena
from proa_engine.mover.deadline import Deadline, TimedReader, send_all
from proa_engine.mover.frames import (
    BadFrame,
    BlocksRequest,
    Header,
    Kind,
    Reader,
    Refusal,
    check_fingerprint,
    encode_request,
    read_content,
    read_header,
)
from proa_engine.mover.index import STATE, Filled, Index, Key
from proa_engine.mover.messages import Init
from proa_engine.mover.sources import Sources
from proa_engine.tls import Plaintext, Tls

_BUFFER_BYTES = 1 << 18  # of small reads; larger ones go straight into the arena
_GRACE_SECONDS = 1.0  # beyond `wait_ms`, after which the source ends its answer itself
_LOG_SECONDS = 60.0  # from a line of the log to the same one again
_MAX_LOGGED = 100  # lines in that time
_SHOWN_CHARACTERS = 100  # of an address in the log


@dataclass(slots=True)
class _Received(Filled):
    """What a job has received, and what of its checkpoint, which comes last."""

    tails: dict[Key, tuple[int, int]] = field(default_factory=dict)  # by table and hash: place and page
    num_tails: int = 0
    has_state: bool = False


class Unreachable(Exception):
    """There is no connection to the source. The reason is for the log alone: from an error, clients that name sources
    would learn which addresses exist and what listens there. `key`: of reasons that are logged as one."""

    def __init__(self, reason: str, key: str = "") -> None:
        super().__init__(reason)
        self.key = key or reason


class Client:
    """Runs jobs. `on_end` is called once for each, from its thread, when nothing is written any more. `log` is
    called with lines about sources, from any thread."""

    def __init__(
        self,
        arena: Arena,
        index: Index,
        init: Init,
        on_end: Callable[[Fetched], None],
        tls: Tls | Plaintext,
        log: Callable[[str], None] = lambda _: None,
    ) -> None:
        self._arena = arena
        self._index = index
        self._init = init
        self._sources = Sources(init.sources)
        self._tls = tls
        self._on_end = on_end
        self._log = log
        self._lock = Lock()  # of the next two
        self._logged: dict[str, float] = {}  # when, by key
        self._connections: dict[int, socket.socket | None] = {}  # by job id; None: not connected yet

    def fetch(self, job: FetchJob) -> None:
        """Start a job."""
        self._connections[job.job_id] = None
        arguments = (job, self._index.num_resets)
        try:
            Thread(target=self._run, args=arguments, name=f"proa-mover-fetch-{job.job_id}", daemon=True).start()
        except RuntimeError as problem:  # the container's limit of threads is reached
            self._end(job, _Received(), str(problem))

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
        wait = job.wait_ms / 1000 + _GRACE_SECONDS
        deadline = Deadline(job.max_ms / 1000, wait)
        try:
            if not self._index.clear_for(job):
                raise BadFrame("copies of earlier steps did not end in time")
            deadline.end_unit()
            self._receive(job, received, deadline)
        except Unreachable as problem:
            error = "there is no connection to the source"
            self._log_once(f"no KV cache blocks are fetched: {problem}", problem.key)
        except TimeoutError as problem:
            error = f"the source is too slow: {problem}"
        except (OSError, BadFrame) as problem:
            error = str(problem) or type(problem).__name__
        except Exception as problem:  # a job that does not end would keep its requests waiting
            error = f"{type(problem).__name__}: {problem}"
        self._index.add_received(received.units, received.checkpoint, num_resets)
        self._end(job, received, error)

    def _end(self, job: FetchJob, received: _Received, error: str) -> None:
        with self._lock:
            self._connections.pop(job.job_id, None)
        self._on_end(received.end(job.job_id, error))

    def _receive(self, job: FetchJob, received: _Received, deadline: Deadline) -> None:
        """Receive the job's blocks. Raises `OSError`, `Unreachable` or `BadFrame`; what is whole is in `received`."""
        init = self._init
        if len(job.addresses) != init.num_ranks:
            raise BadFrame(f"the source has {len(job.addresses)} ranks, this engine {init.num_ranks}")
        with self._connect(job.addresses[init.rank], deadline) as connection:
            self._set_connection(job, connection)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(deadline.left())  # of the whole handshake of TLS
            try:
                wrapped = self._tls.connect(connection)
            except OSError as problem:
                raise Unreachable(f"no TLS connection to {job.addresses[init.rank]}: {problem}") from None
            with wrapped:
                self._set_connection(job, wrapped)
                self._exchange(wrapped, job, received, deadline)

    def _connect(self, address: str, deadline: Deadline) -> socket.socket:
        """Raises `Unreachable`, or `TimeoutError` at the deadline."""
        host, _, port = address.rpartition(":")
        if not port.isascii() or not port.isdecimal() or not 0 < int(port[:6]) < 1 << 16:
            raise Unreachable(f"{address[:_SHOWN_CHARACTERS]!r}, their source, is not HOST:PORT", "invalid")
        addresses = self._sources.addresses_of(host.strip("[]"))
        if not addresses:
            shown = repr(address[:_SHOWN_CHARACTERS])
            raise Unreachable(f"a request names {shown} as their source, --kv-transfer-sources does not", "unknown")
        reason = ""
        for each in addresses:
            try:
                return socket.create_connection((each, int(port)), timeout=deadline.left())
            except OSError as problem:
                reason = problem.strerror or str(problem)
        raise Unreachable(f"no connection to {address}: {reason}")

    def _set_connection(self, job: FetchJob, connection: socket.socket) -> None:
        """Let `cancel` find the job's connection. Raises `BadFrame` if the job was cancelled."""
        with self._lock:
            if job.job_id not in self._connections:
                raise BadFrame("the request was aborted")
            self._connections[job.job_id] = connection

    def _log_once(self, line: str, key: str) -> None:
        """Log a line, unless one with its key was logged a short time ago."""
        now = time.monotonic()
        with self._lock:
            self._logged = {each: then for each, then in self._logged.items() if now - then < _LOG_SECONDS}
            if key in self._logged or len(self._logged) >= _MAX_LOGGED:
                return
            self._logged[key] = now
        self._log(line)

    def _exchange(self, connection: socket.socket, job: FetchJob, received: _Received, deadline: Deadline) -> None:
        """Send the job's request and take the answer."""
        deadline.end_unit()
        send_all(connection, [encode_request(_request(job, self._init), job.chain)], deadline)
        with BufferedReader(TimedReader(connection, deadline), _BUFFER_BYTES) as stream:
            header = read_header(stream)
            if header.kind == Kind.FINGERPRINT:
                check_fingerprint(stream, self._init.fingerprint, header)
                header = read_header(stream)
            elif header.kind != Kind.REFUSED:
                raise BadFrame("the source does not say which model it has")
            while header.kind != Kind.END:
                self._take(stream, header, job, received)
                deadline.end_unit()
                header = read_header(stream)

    def _take(self, stream: Reader, header: Header, job: FetchJob, received: _Received) -> None:
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
                if received.num_tails >= sum(map(len, job.tails)):
                    raise BadFrame("more tails came than were asked for")
                self._read(stream, header, key, page, received)
                received.tails[key] = header.column, page
                received.num_tails += 1
            case Kind.STATE if job.state != NO_STATE and not received.has_state:
                unit = self._arena.unit_of_slot(job.state)
                self._read(stream, header, (STATE, header.block_hash), unit, received)
                received.has_state = True
            case Kind.CHECKPOINT:
                received.checkpoint = _checkpoint(header, job, received)
            case Kind.REFUSED:
                raise BadFrame(_refusal(header.code))
            case _:
                raise BadFrame(f"a frame of kind {header.kind} came")

    def _read(self, stream: Reader, header: Header, key: Key, unit: int, received: _Received) -> None:
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
        num_blocks=len(job.chain),
        num_held=job.num_held,
        needs_checkpoint=job.needs_checkpoint,
        wait_ms=job.wait_ms,
        max_ms=job.max_ms,
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
