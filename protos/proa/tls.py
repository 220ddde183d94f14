"""The files of one side of mutual TLS between gateway and engine, read anew for connections to come.

A Secret that is mounted into a pod changes while the pod runs; nothing is to be restarted for it. Knows no gRPC.
"""

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path

from proa.options import option

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TlsIdentity:
    """PEM: this side's certificate with its key, where it has one, and who must have signed the other side's."""

    certificate: bytes | None
    key: bytes | None
    authority: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class TlsFiles:
    """Where the PEM files are. Raises `ValueError` for a certificate without its key, or the other way round."""

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
        """Raises `ValueError` with a sentence for files that cannot be used."""
        return TlsIdentity(_read(self.certificate), _read(self.key), _read(self.authority))

    def check(self) -> None:
        """Raises `ValueError` with a sentence where a file is not what it should be, or key and certificate differ."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        if self.certificate is not None and self.key is not None:
            try:
                context.load_cert_chain(self.certificate, self.key, password="")  # never ask a terminal for one
            except (ssl.SSLError, OSError) as error:
                pair = f"{self.certificate} and {self.key}"
                raise ValueError(f"{pair} are not a certificate and its key in PEM: {error}") from None
        if self.authority is not None:
            try:
                context.load_verify_locations(self.authority)
            except (ssl.SSLError, OSError) as error:
                raise ValueError(f"{self.authority} holds no certificates in PEM: {error}") from None


class TlsSource:
    """What the files hold now. Files that cannot be used are told of, and what was read before goes on."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises `ValueError` with a sentence."""
        self._files = files
        self._identity = files.read()
        self._complaint = ""
        files.check()

    def current(self) -> TlsIdentity:
        """The same object as long as the files do not change."""
        try:
            identity = self._files.read()
            if identity != self._identity:
                self._files.check()
                self._identity = identity
                _log.info("the certificates of connections to come are new")
        except ValueError as error:
            if str(error) != self._complaint:
                _log.error("certificates stay as they were: %s", error)
            self._complaint = str(error)
        else:
            self._complaint = ""
        return self._identity


def _read(path: Path | None) -> bytes | None:
    try:
        return None if path is None else path.read_bytes()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None
