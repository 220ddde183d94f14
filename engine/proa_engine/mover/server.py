"""Server: answers other engines' requests for blocks, on a thread for each connection."""

import select
import socket
import ssl
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from io import BufferedReader
from threading import BoundedSemaphore, Thread

from proa_engine.mover.arena import Arena
from proa_engine.mover.frames import VERSION, BadFrame, BlocksRequest, Header, Kind, Refusal, read_request
from proa_engine.mover.index import STATE, Entry, Index, Key
from proa_engine.mover.messages import Init
from proa_engine.tls import Tls

MAX_CONNECTIONS = 256  # one for each request of an engine that drains, or that waits for blocks to be computed
_RETRY_SECONDS = 0.1  # after a connection that could not be accepted
_IDLE_SECONDS = 60.0  # without a request, or without progress of an answer
_MAX_BUFFERS = 512  # in one call of `sendmsg`; Linux allows 1024
_MAX_BLOCKS = _MAX_BUFFERS // 2  # sent together: a header and a page each


class Server:
    """Serves until its listener is closed. `tls` None: in plaintext."""

    def __init__(self, listener: socket.socket, arena: Arena, index: Index, init: Init, tls: Tls | None = None) -> None:
        self._listener = listener
        self._arena = arena
        self._index = index
        self._init = init
        self._tls = tls
        self._free = BoundedSemaphore(MAX_CONNECTIONS)

    def serve_forever(self) -> None:
        while self._listener.fileno() >= 0:
            try:
                connection, _ = self._listener.accept()
            except OSError:  # for example because no file descriptor is free
                time.sleep(_RETRY_SECONDS)
                continue
            connection.settimeout(_IDLE_SECONDS)
            if self._begin(connection):
                continue
            with suppress(OSError), connection:
                if self._tls is None:  # a handshake would delay other connections
                    _send(connection, [Header(Kind.REFUSED, code=Refusal.BUSY).encode()])

    def _begin(self, connection: socket.socket) -> bool:
        """Serve a connection on a thread of its own. Returns False if there are as many as there can be."""
        if not self._free.acquire(blocking=False):
            return False
        try:
            Thread(target=self._serve, args=(connection,), name="proa-mover-serve", daemon=True).start()
        except RuntimeError:  # the container's limit of threads is reached
            self._free.release()
            return False
        return True

    def _serve(self, connection: socket.socket) -> None:
        """Answer the requests of one connection. Whatever is wrong with one ends the connection."""
        try:
            with suppress(OSError, BadFrame), connection:
                connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with connection if self._tls is None else self._tls.accept(connection) as wrapped:
                    self._answer_all(wrapped)
        finally:
            self._free.release()

    def _answer_all(self, connection: socket.socket) -> None:
        with BufferedReader(socket.SocketIO(connection, "r")) as stream:
            while (request := read_request(stream)) is not None:
                self._answer(connection, request)

    def _answer(self, connection: socket.socket, request: BlocksRequest) -> None:
        refusal = refusal_of(request, self._init, self._index.since)
        if refusal is not None:
            _send(connection, [Header(Kind.REFUSED, code=refusal).encode()])
            return
        chain, wait, is_open = request.hashes, request.wait_ms / 1000, partial(_is_open, connection)
        column = request.num_held
        while found := self._index.blocks(chain[column : column + _MAX_BLOCKS], wait, is_open):
            blocks = enumerate(zip(chain[column:], found, strict=False), start=column)
            _send(connection, self._frames(((0, block_hash), each, entry) for each, (block_hash, entry) in blocks))
            column += len(found)
        # One at the end of the chain is still to come if all its blocks have come.
        is_complete = column == len(chain)
        if request.needs_checkpoint:
            self._send_checkpoint(connection, chain[:column], wait if is_complete else 0.0)
        _send(connection, [Header(Kind.END, column=column).encode()])

    def _send_checkpoint(self, connection: socket.socket, chain: Sequence[bytes], wait: float) -> None:
        found = self._index.checkpoint(chain, wait, partial(_is_open, connection))
        if found is None:
            return
        stored, units = found
        places: dict[Key, int] = {}  # blocks between a tail and the checkpoint
        for table, tail in enumerate(stored.tails, start=1):
            places |= {(table, block_hash): place for place, (_, block_hash) in enumerate(reversed(tail))}
        _send(connection, self._frames((key, places.get(key, 0), entry) for key, entry in units))
        column = chain.index(stored.block_hash) + 1
        _send(connection, [Header(Kind.CHECKPOINT, column=column, block_hash=stored.block_hash).encode()])

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


def _send(connection: socket.socket, buffers: Iterable[bytes | memoryview]) -> None:
    """Send all buffers, many in one call. Raises `OSError`, also if the receiver takes none for a minute."""
    if isinstance(connection, ssl.SSLSocket):  # it has no `sendmsg`
        for buffer in buffers:
            connection.sendall(buffer)
        return
    waiting = [memoryview(buffer) for buffer in buffers]
    first = 0
    while first < len(waiting):
        num_sent = connection.sendmsg(waiting[first : first + _MAX_BUFFERS])
        while first < len(waiting) and num_sent >= len(waiting[first]):
            num_sent -= len(waiting[first])
            first += 1
        if num_sent:
            waiting[first] = waiting[first][num_sent:]
