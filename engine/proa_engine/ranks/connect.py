"""Connect a rank of another node to node 0."""

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import ExitStack

import msgspec

from proa_engine.config import PeerTls
from proa_engine.framing import Stream, encode, receive
from proa_engine.ranks.handshake import MAX_BYTES, SECONDS, Hello, Refused, answer_decoder
from proa_engine.ranks.tcp import deadline, open_stream
from proa_engine.tls import Plaintext, Tls, make_tls

_RETRY_SECONDS = 1.0
_LOG_SECONDS = 30.0


class NodeRank(msgspec.Struct, frozen=True):
    """A rank, and where node 0 accepts it. `tls` None: in plaintext."""

    hello: Hello
    host: str
    port: int
    tls: PeerTls | None = None

    @property
    def node_0(self) -> str:
        """The name of node 0 in messages."""
        return f"node 0 at [{self.host}]:{self.port}" if ":" in self.host else f"node 0 at {self.host}:{self.port}"


class RankRefused(Exception):
    """Node 0 does not accept this rank. The message is a sentence for the user."""


def connect(rank: NodeRank, log: Callable[[str], None]) -> Stream:
    """Return a connection on which node 0 has accepted `rank`. Retries until node 0 listens.

    Raises `RankRefused`, also if one side does not accept the other's certificate, and `ValueError` if a TLS file is
    invalid.
    """
    tls = make_tls(rank.tls)
    logged = float("-inf")
    while True:
        try:
            return _connect_once(rank, tls)
        except ssl.SSLEOFError as error:  # node 0 ended meanwhile, or what forwards the port answered in its place
            reason = str(error)
        except ssl.SSLError as error:
            raise RankRefused(f"no TLS connection to {rank.node_0}: {error}") from error
        except OSError as error:
            reason = error.strerror or str(error)
        if (now := time.monotonic()) - logged > _LOG_SECONDS:
            log(f"waiting for {rank.node_0}: {reason}")
            logged = now
        time.sleep(_RETRY_SECONDS)


def _connect_once(rank: NodeRank, tls: Tls | Plaintext) -> Stream:
    connection = socket.create_connection((rank.host, rank.port), SECONDS)
    with deadline(connection, SECONDS), ExitStack() as unless_accepted:
        stream = open_stream(connection, tls.connect)
        unless_accepted.callback(stream.close)
        stream.sendall(encode(rank.hello))
        try:
            answer = receive(stream, answer_decoder, max_bytes=MAX_BYTES)
        except ValueError as error:
            text = "does not answer as a node, or only with TLS (--tls-cert, --tls-key, --tls-ca)"
            raise RankRefused(f"{rank.node_0} {text}: {error}") from None
        if isinstance(answer, Refused):
            raise RankRefused(f"{rank.node_0} refuses rank {rank.hello.rank}: {answer.reason}")
        unless_accepted.pop_all()
    return stream
