"""TLS between processes of engines, on plain sockets: each side shows the engine's certificate, and demands one that
the same authority has signed."""

import socket
import ssl
from pathlib import Path
from threading import Lock

from proa.tls import TlsFiles, TlsIdentity, TlsSource
from proa_engine.config import PeerTls

_SERVER_NAME = "proa-engine"  # in the certificates of all engines, as gateways expect it too


class Tls:
    """Wraps connections in TLS 1.3. The files are read again for each new connection. Thread-safe."""

    def __init__(self, files: PeerTls) -> None:
        """Raises `ValueError` if a file is invalid."""
        self._files = TlsFiles(
            certificate=Path(files.certificate_file), key=Path(files.key_file), authority=Path(files.authority_file)
        )
        self._source = TlsSource(self._files)
        self._lock = Lock()
        self._identity: TlsIdentity | None = None  # of the contexts
        self._server: ssl.SSLContext
        self._client: ssl.SSLContext

    def accept(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return the server's side of a connection, after the handshake. Raises `OSError`."""
        self._refresh()
        return self._server.wrap_socket(connection, server_side=True)

    def connect(self, connection: socket.socket) -> ssl.SSLSocket:
        """Return the client's side of a connection, after the handshake. Raises `OSError`."""
        self._refresh()
        return self._client.wrap_socket(connection, server_hostname=_SERVER_NAME)

    def _refresh(self) -> None:
        """Make contexts of the current files. Raises `OSError` if they change meanwhile."""
        with self._lock:
            identity = self._source.current()
            if identity is self._identity:
                return
            self._server = self._context(ssl.PROTOCOL_TLS_SERVER)
            self._client = self._context(ssl.PROTOCOL_TLS_CLIENT)
            self._identity = identity

    def _context(self, protocol: int) -> ssl.SSLContext:
        context = ssl.SSLContext(protocol)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.verify_mode = ssl.CERT_REQUIRED
        assert self._files.certificate is not None
        context.load_cert_chain(self._files.certificate, self._files.key, password="")
        context.load_verify_locations(self._files.authority)
        return context


class Plaintext:
    """In place of `Tls` where the configuration has no files for it."""

    def accept(self, connection: socket.socket) -> socket.socket:
        return connection

    def connect(self, connection: socket.socket) -> socket.socket:
        return connection


def make_tls(files: PeerTls | None) -> Tls | Plaintext:
    """Raises `ValueError` if a file is invalid."""
    return Tls(files) if files else Plaintext()
