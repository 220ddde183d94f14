"""Certificate authorities and certificates for tests, made with the openssl program."""

import shlex
import subprocess
from dataclasses import dataclass
from pathlib import Path

_NEW_KEY = "-newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes"


@dataclass(frozen=True, slots=True)
class Certificate:
    """Files in PEM. `authority` is the certificate of who signed it, its own where nobody did."""

    certificate: Path
    key: Path
    authority: Path

    @property
    def serial(self) -> str:
        return serial_of(self.certificate.read_text())


def serial_of(pem: str) -> str:
    """The serial number of a certificate, or nothing where that is no certificate."""
    return _openssl("x509 -noout -serial", stdin=pem, check=False).strip()


def self_signed(folder: Path, name: str) -> Certificate:
    """A server's certificate for one DNS name."""
    certificate, key = folder / "tls.crt", folder / "tls.key"
    subject = f"-subj /CN=proa -addext subjectAltName=DNS:{name}"
    _openssl(f"req -x509 {_NEW_KEY} -days 1 {subject} -keyout {key} -out {certificate}")
    return Certificate(certificate, key, certificate)


def signed(folder: Path, name: str = "proa-engine") -> Certificate:
    """A certificate for both sides of a connection to `name`, by an authority of its own; `folder` is made."""
    folder.mkdir()
    certificate, key, request = folder / "tls.crt", folder / "tls.key", folder / "tls.csr"
    authority, authority_key, extensions = folder / "ca.crt", folder / "ca.key", folder / "extensions"
    extensions.write_text(f"subjectAltName=DNS:{name}\nextendedKeyUsage=serverAuth,clientAuth\n")
    _openssl(f"req -x509 {_NEW_KEY} -days 1 -subj /CN=authority -keyout {authority_key} -out {authority}")
    _openssl(f"req {_NEW_KEY} -subj /CN=proa -keyout {key} -out {request}")
    signer = f"-CA {authority} -CAkey {authority_key} -CAcreateserial"
    _openssl(f"x509 -req -in {request} {signer} -days 1 -extfile {extensions} -out {certificate}")
    return Certificate(certificate, key, authority)


def _openssl(arguments: str, *, stdin: str = "", check: bool = True) -> str:
    command = ["openssl", *shlex.split(arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, input=stdin)
    assert not check or done.returncode == 0, done.stderr
    return done.stdout
