"""Server: answers other engines' requests for blocks, on a thread for each connection."""

import select
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from io import BufferedReader
from threading import Lock, Thread

from proa_engine.core.types import StoredCheckpoint
from proa_engine.mover.arena import Arena
from proa_engine.mover.deadline import Deadline, TimedReader, send_all
from proa_engine.mover.frames import (
    FINGERPRINT_BYTES,
    HASH_BYTES,
    VERSION,
    BadFrame,
    BlocksRequest,
    Chain,
    Header,
    Kind,
    Refusal,
    read_chain,
    read_request,
)
from proa_engine.mover.index import STATE, Entry, Index, Key
from proa_engine.mover.messages import Init
from proa_engine.strangers import Strangers
from proa_engine.tls import Plaintext, Tls

MAX_CONNECTIONS = 256  # that are answered: one for each request of an engine that drains, or that waits for blocks
MAX_SILENT = 64  # connections whose whole request has not come
MAX_CHAIN_BYTES = 1 << 25  # of all requests with long chains, together
SHORT_CHAIN_BYTES = 1 << 16  # 65,000 tokens at 16 tokens a block
REQUEST_SECONDS = 10.0  # from the connection to its whole request, the TLS handshake included
_REFUSAL_SECONDS = 1.0  # until the peer has read a refusal
_END_SECONDS = 1.0  # beyond the request's own limit, so that the target ends it
_BATCH_SECONDS = 60.0  # until the target has taken what is sent together
_BATCH_BYTES = 1 << 26
_BATCH_BLOCKS = 256
_RETRY_SECONDS = 0.1  # after a connection that could not be accepted


class _Limits:
    """Limits of what all connections hold together. Thread-safe."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._num_answered = self._num_bytes = 0

    @contextmanager
    def chain(self, num_bytes: int) -> Iterator[bool]:
        """Hold memory for a chain. False: there is not enough. Short chains are limited by the connections alone."""
        counted = num_bytes if num_bytes > SHORT_CHAIN_BYTES else 0
        with self._lock:
            has_room = self._num_bytes + counted <= MAX_CHAIN_BYTES
            self._num_bytes += counted * has_room
        try:
            yield has_room
        finally:
            with self._lock:
                self._num_bytes -= counted * has_room

    @contextmanager
    def answered(self) -> Iterator[bool]:
        """Hold one of `MAX_CONNECTIONS` places. False: there is none."""
        with self._lock:
            has_room = self._num_answered < MAX_CONNECTIONS
            self._num_answered += has_room
        try:
            yield has_room
        finally:
            with self._lock:
                self._num_answered -= has_room


class Server:
    """Serves until its listener is closed."""

    def __init__(self, listener: socket.socket, arena: Arena, index: Index, init: Init, tls: Tls | Plaintext) -> None:
        self._listener = listener
        self._arena = arena
        self._index = index
        self._init = init
        self._tls = tls
        self._strangers = Strangers(MAX_SILENT)
        self._limits = _Limits()
        self._batch_blocks = min(max(_BATCH_BYTES // init.layout.page_bytes, 1), _BATCH_BLOCKS)

    def serve_forever(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # for example because no file descriptor is free
                time.sleep(_RETRY_SECONDS)
                continue
            try:
                Thread(target=self._serve, args=(connection,), name="proa-mover-serve", daemon=True).start()
            except RuntimeError:  # the container's limit of threads is reached
                connection.close()

    def _serve(self, connection: socket.socket) -> None:
        """Answer the request of one connection. Whatever is wrong with it ends the connection."""
        with suppress(OSError, BadFrame), connection, ExitStack() as at_end:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._strangers.hold(connection):
                deadline = Deadline(REQUEST_SECONDS)
                connection.settimeout(REQUEST_SECONDS)  # of the whole handshake of TLS
                connection = at_end.enter_context(self._tls.accept(connection))
                stream = BufferedReader(TimedReader(connection, deadline))
                request = read_request(stream)
                if request is None:
                    return
                refusal = refusal_of(request, self._init, self._index.since)
                has_memory = refusal is None and at_end.enter_context(
                    self._limits.chain(request.num_blocks * HASH_BYTES)
                )
                chain = read_chain(stream, request.num_blocks) if has_memory else None
                if chain is None or not at_end.enter_context(self._limits.answered()):
                    _refuse(connection, refusal or Refusal.BUSY)
                    return
            self._answer(connection, request, chain)

    def _answer(self, connection: socket.socket, request: BlocksRequest, chain: Chain) -> None:
        """Send what the request asks for. Raises `OSError`, also if the target takes it too slowly."""
        deadline = Deadline(request.max_ms / 1000 + _END_SECONDS, _BATCH_SECONDS)
        is_open = partial(_is_open, connection)

        def waits() -> float:
            return min(request.wait_ms / 1000, deadline.left())

        def send(buffers: Iterable[bytes | memoryview]) -> None:
            deadline.end_unit()  # waiting for blocks takes none of the target's time
            send_all(connection, list(buffers), deadline)

        send([Header(Kind.FINGERPRINT, length=FINGERPRINT_BYTES).encode(), self._init.fingerprint])
        column = request.num_held
        while found := self._index.blocks([*chain[column : column + self._batch_blocks]], waits(), is_open):
            blocks = enumerate(zip(chain[column : column + len(found)], found, strict=True), start=column)
            send(self._frames(((0, block_hash), each, entry) for each, (block_hash, entry) in blocks))
            column += len(found)
        # One at the end of the chain is still to come if all its blocks have come.
        is_complete = column == len(chain)
        if request.needs_checkpoint:
            found_last = self._index.checkpoint(chain[:column], waits() if is_complete else 0.0, is_open)
            if found_last is not None:
                send(self._checkpoint_frames(chain, *found_last))
        send([Header(Kind.END, column=column).encode()])

    def _checkpoint_frames(
        self, chain: Chain, stored: StoredCheckpoint, units: Iterable[tuple[Key, Entry]]
    ) -> Iterator[bytes | memoryview]:
        places: dict[Key, int] = {}  # blocks between a tail and the checkpoint
        for table, tail in enumerate(stored.tails, start=1):
            places |= {(table, block_hash): place for place, (_, block_hash) in enumerate(reversed(tail))}
        yield from self._frames((key, places.get(key, 0), entry) for key, entry in units)
        column = chain.index(stored.block_hash) + 1
        yield Header(Kind.CHECKPOINT, column=column, block_hash=stored.block_hash).encode()

    def _frames(self, units: Iterable[tuple[Key, int, Entry]]) -> Iterator[bytes | memoryview]:
        """Yield the frames of units, given with their columns."""
        for (table, block_hash), column, entry in units:
            buffers = self._arena.buffers(entry.unit)
            kind, length = Kind.STATE if table == STATE else Kind.PAGE, sum(map(len, buffers))
            yield Header(kind, max(table, 0), 0, column, block_hash, entry.checksum, length).encode()
            yield from buffers


def refusal_of(request: BlocksRequest, init: Init, since: float) -> Refusal | None:
    """Return why a request gets nothing; None if it is served. `since`: nothing that is served is older."""
    if request.version != VERSION:
        return Refusal.VERSION
    if request.fingerprint != init.fingerprint:
        return Refusal.FINGERPRINT
    if (request.rank, request.num_ranks) != (init.rank, init.num_ranks):
        return Refusal.RANK
    return Refusal.RESET if since < request.since else None


def _is_open(connection: socket.socket) -> bool:
    """Whether the peer has not closed the connection. Otherwise a fetch that the peer has ended would occupy one of
    `MAX_CONNECTIONS` until its wait is over."""
    poll = select.poll()
    poll.register(connection, select.POLLRDHUP)
    return not poll.poll(0)


def _refuse(connection: socket.socket, refusal: Refusal) -> None:
    """Send a refusal, and wait until the peer has read it: closing a connection with bytes that were not read, here
    those of a chain, deletes what it was sent."""
    deadline = Deadline(_REFUSAL_SECONDS)
    send_all(connection, [Header(Kind.REFUSED, code=refusal).encode()], deadline)
    socket.socket.shutdown(connection, socket.SHUT_WR)
    unread = TimedReader(connection, deadline)
    buffer = memoryview(bytearray(1 << 13))
    while unread.readinto(buffer):
        pass
