"""TLS files of the gateway or of an engine, reloaded for new connections.

Kubernetes updates a mounted Secret while the pod runs; no restart is needed.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from proa.options import option

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """PEM data: the own certificate and its key, if any, and the authority that must have signed the peer's."""

    certificate: bytes | None
    key: bytes | None
    authority: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Paths of the PEM files. Raises `ValueError` for a certificate without a key or a key without a certificate."""

    certificate: Path | None = option(
        None, "certificate of this process (PEM); read again for each new connection", flag="--tls-cert", metavar="FILE"
    )
    key: Path | None = option(None, "private key of --tls-cert (PEM)", flag="--tls-key", metavar="FILE")
    authority: Path | None = option(
        None,
        "certificate authority that must have signed the other side's certificate (PEM)",
        flag="--tls-ca",
        metavar="FILE",
    )

    def __post_init__(self) -> None:
        if (self.certificate is None) != (self.key is None):
            raise ValueError("a certificate and its key belong together: give both --tls-cert and --tls-key")

    def read(self) -> TlsIdentity:
        """Raises `ValueError` if a file cannot be read."""
        return TlsIdentity(_read(self.certificate), _read(self.key), _read(self.authority))

    def check(self) -> None:
        """Raises `ValueError` if a file is not valid PEM or the key is not the certificate's."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.certificate is not None and self.key is not None:
            try:
                # Without a password OpenSSL would ask for one on the terminal.
                context.load_cert_chain(self.certificate, self.key, password="")
            except (ssl.SSLError, OSError) as error:
                pair = f"{self.certificate} and {self.key}"
                raise ValueError(f"{pair} are not a certificate and its key in PEM: {error}") from None
        if self.authority is not None:
            try:
                context.load_verify_locations(self.authority)
            except (ssl.SSLError, OSError) as error:
                raise ValueError(f"{self.authority} holds no certificates in PEM: {error}") from None


class TlsSource:
    """The current identity from the files. Invalid files are logged, and the previous identity stays in use."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises `ValueError` if the files are invalid."""
        self._files = files
        self._identity = files.read()
        self._last_error = ""
        files.check()

    def current(self) -> TlsIdentity:
        """Read the files. Returns the same object until they change."""
        try:
            identity = self._files.read()
            if identity != self._identity:
                self._files.check()
                self._identity = identity
                _log.info("TLS certificates reloaded, new connections use them")
        except ValueError as error:
            if str(error) != self._last_error:
                _log.error("TLS certificates not reloaded, the previous ones stay in use: %s", error)
            self._last_error = str(error)
        else:
            self._last_error = ""
        return self._identity


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
