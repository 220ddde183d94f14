"""RemoteRanks: node 0's listener, which accepts the connections of the other nodes' ranks."""

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from ipaddress import IPv6Address, ip_address
from threading import Lock, Thread

from proa_engine.config import EngineConfig
from proa_engine.framing import Stream, encode, receive
from proa_engine.ranks.distributed import LOOPBACK
from proa_engine.ranks.handshake import MAX_BYTES, SECONDS, Hello, Refused, Welcome, hello_decoder, refusal
from proa_engine.ranks.tcp import deadline, open_stream
from proa_engine.strangers import Strangers
from proa_engine.tls import Plaintext, Tls, make_tls

_MAX_HANDSHAKES = 64  # at once; a rank whose handshake is ended for a newer one tries again
_MAX_LOGGED = 256  # addresses whose refusal is logged
_TLS_HANDSHAKE = b"\x16"  # the first byte of a TLS connection (RFC 8446, 5.1)
_RETRY_SECONDS = 0.1  # after a connection that could not be accepted


class RemoteRanks:
    """Accepts ranks from its construction until `close`: also while the engine runs, to refuse them with a reason.

    A peer that is not a rank of this engine is refused, and logged once for each address.
    """

    def __init__(self, config: EngineConfig, log: Callable[[str], None]) -> None:
        """Raises `ValueError` if the port cannot be bound or a TLS file is invalid."""
        assert config.parallel.master_addr is not None, "checked by Parallel"
        self.local_address = LOOPBACK  # of this node, as the last other node that was accepted reached it
        self._config = config
        self._log = log
        self._tls = make_tls(config.peer_tls)
        self._strangers = Strangers(_MAX_HANDSHAKES)
        self._lock = Lock()
        self._addresses: dict[int, str] = {}  # by rank that is accepted: of its node
        self._streams: dict[int, Stream] = {}  # by rank: not taken yet
        self._logged: set[tuple[str, str]] = set()  # addresses and types of errors
        self._is_closed = False
        is_local = _is_loopback(config.parallel.master_addr)
        if not config.peer_tls and not is_local:
            log("nodes connect in plaintext and without authentication: give --tls-cert, --tls-key and --tls-ca")
        try:
            self._listener = _listen(config.parallel.master_addr if is_local else "", config.parallel.master_port)
        except OSError as error:
            reason = error.strerror or error
            port = config.parallel.master_port
            raise ValueError(f"cannot listen on port {port} (--master-port): {reason}") from error
        Thread(target=self._accept_all, name="proa-nodes", daemon=True).start()

    def take(self, rank: int) -> Stream | None:
        """Return the connection of a rank, which the caller then owns; None until it is accepted."""
        with self._lock:
            return self._streams.pop(rank, None)

    def describe(self, rank: int) -> str:
        """Return the rank's node for messages, with its address once the rank is accepted."""
        with self._lock:
            address = self._addresses.get(rank)
        node = f"node {rank // self._config.parallel.ranks_per_node}"
        return f"{node} at {address}" if address else node

    def close(self) -> None:
        """Accept no more connections, and close those that were not taken. May be called twice."""
        with self._lock:
            self._is_closed = True
            while self._streams:
                self._streams.popitem()[1].close()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()

    def _accept_all(self) -> None:
        while not self._is_closed:
            try:
                connection, address = self._listener.accept()
            except OSError:  # closed; or for example no file descriptor is free
                time.sleep(_RETRY_SECONDS)
                continue
            host = _plain(address[0])
            try:
                Thread(target=self._handshake, args=(connection, host), name="proa-node", daemon=True).start()
            except RuntimeError as error:  # the container's limit of threads is reached
                connection.close()
                self._log_refusal(host, error)

    def _handshake(self, connection: socket.socket, address: str) -> None:
        try:
            with deadline(connection, SECONDS), ExitStack() as unless_accepted, ExitStack() as until_known:
                until_known.enter_context(self._strangers.hold(connection))
                local_address = _plain(connection.getsockname()[0])
                tls = self._tls
                if isinstance(tls, Tls) and connection.recv(1, socket.MSG_PEEK) != _TLS_HANDSHAKE:
                    tls = Plaintext()  # to answer such that the peer understands
                stream = open_stream(connection, tls.accept)
                unless_accepted.callback(stream.close)
                try:
                    hello = receive(stream, hello_decoder, max_bytes=MAX_BYTES)
                    if tls is not self._tls:
                        raise ValueError("node 0 demands TLS: give --tls-cert, --tls-key and --tls-ca on all nodes")
                    self._reserve(hello, address)
                    until_known.close()
                except ValueError as error:
                    self._log_refusal(address, error)
                    _refuse(stream, str(error))
                    return
                unless_accepted.callback(self._free_rank, hello.rank)
                stream.sendall(encode(Welcome()))
                unless_accepted.pop_all()
            with self._lock:  # not before the answer, which must be the first message
                if self._is_closed:
                    stream.close()
                    return
                self._streams[hello.rank] = stream
                self.local_address = local_address
            self._log(f"rank {hello.rank} has connected ({self.describe(hello.rank)})")
        except ssl.SSLError as error:
            self._log_refusal(address, error)
        except OSError as error:
            text = f"it ended, or took longer than {SECONDS:g} s to say what it is: {error}"
            self._log_refusal(address, ConnectionError(text))

    def _reserve(self, hello: Hello, address: str) -> None:
        """Keep a rank for one peer. Raises `ValueError` with the reason if node 0 does not accept it."""
        with self._lock:
            if reason := refusal(hello, self._config, self._addresses):
                raise ValueError(reason)
            self._addresses[hello.rank] = address

    def _free_rank(self, rank: int) -> None:
        with self._lock:
            del self._addresses[rank]

    def _log_refusal(self, address: str, error: Exception) -> None:
        """Log the first error of its type of an address."""
        with self._lock:
            if (key := (address, type(error).__name__)) in self._logged or len(self._logged) == _MAX_LOGGED:
                return
            self._logged.add(key)
            is_last = len(self._logged) == _MAX_LOGGED
        self._log(f"refused a connection from {address} to port {self._config.parallel.master_port}: {error}")
        if is_last:
            self._log(f"refused connections of {_MAX_LOGGED} addresses; those of other addresses are not logged")


def _refuse(stream: Stream, reason: str) -> None:
    """Send the reason, and read until the peer has closed: closing before would also discard what was sent."""
    with suppress(OSError):
        stream.sendall(encode(Refused(reason)))
        stream.shutdown(socket.SHUT_WR)
        while stream.recv(MAX_BYTES):
            pass


def _listen(host: str, port: int) -> socket.socket:
    """Return a listener. `host` empty: at all addresses."""
    if not host and socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:  # a name
        return host == "localhost"


def _plain(address: str) -> str:
    """Return an IPv4 address as such: a socket for both versions writes it as an IPv6 address."""
    parsed = ip_address(address.partition("%")[0])
    return str(parsed.ipv4_mapped or parsed) if isinstance(parsed, IPv6Address) else str(parsed)
