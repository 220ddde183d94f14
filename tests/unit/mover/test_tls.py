"""Movers that know each other by certificates, and peers that have none, or others."""

import socket
import ssl
import time
from pathlib import Path

import pytest

from proa_engine.config import PeerTls
from proa_engine.core.types import StoredCheckpoint
from support.certificates import Certificate, signed
from support.mounted_secret import MountedSecret
from support.movers import LAYOUT, RunningMover, blocks_request, hashes, make_job, running_mover

CHAIN = hashes(5)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Certificate, Certificate]:
    """Two certificates, each of an authority of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    return signed(folder / "first"), signed(folder / "second")


def tls_of(certificate: Certificate, authority: Certificate | None = None) -> PeerTls:
    signer = (authority or certificate).authority
    return PeerTls(str(certificate.certificate), str(certificate.key), str(signer))


def error_of(source: RunningMover, target: RunningMover, job_id: int = 1) -> str:
    """Why a fetch of stored blocks brings nothing, as the log has it; empty if it brings all."""
    target.fetch(make_job(source, CHAIN, job_id=job_id, wait_ms=500))
    fetched = target.fetched()
    assert fetched.num_blocks == (0 if fetched.error else len(CHAIN))
    return "".join([fetched.error, *target.lines[-1:]]) if fetched.error else ""


def test_blocks_and_a_checkpoint_come_over_tls(made: tuple[Certificate, Certificate]) -> None:
    tls = tls_of(made[0])
    with running_mover(tls=tls) as source, running_mover(tls=tls) as target:
        source.store(CHAIN)
        source.begin_store(10, LAYOUT.num_pages + 1)
        source.end_store(checkpoints=[StoredCheckpoint(CHAIN[-1], [[(10, CHAIN[-1])]], state=1)])
        target.fetch(make_job(source, CHAIN, first_page=3, tails=[[9]], state=2, needs_checkpoint=True))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.checkpoint, fetched.error) == (5, CHAIN[-1], "")
        assert [target.content(3 + page) for page in range(5)] == [source.content(page) for page in range(5)]


def test_a_mover_without_tls_gets_nothing_from_one_that_has_it(made: tuple[Certificate, Certificate]) -> None:
    with running_mover(tls=tls_of(made[0])) as source, running_mover() as target:
        source.store(CHAIN)
        assert error_of(source, target)


def test_a_mover_with_tls_takes_nothing_from_one_that_has_none(made: tuple[Certificate, Certificate]) -> None:
    with running_mover() as source, running_mover(tls=tls_of(made[0])) as target:
        source.store(CHAIN)
        assert error_of(source, target)


def test_a_mover_of_another_authority_is_neither_source_nor_target(made: tuple[Certificate, Certificate]) -> None:
    ours, theirs = made
    with running_mover(tls=tls_of(ours)) as source:
        source.store(CHAIN)
        with running_mover(tls=tls_of(theirs)) as target:
            assert "CERTIFICATE_VERIFY_FAILED" in error_of(source, target)
        with running_mover(tls=tls_of(theirs, authority=ours)) as target:  # it believes the source, which refuses it
            assert error_of(source, target)


def test_a_source_with_another_name_is_not_believed(made: tuple[Certificate, Certificate], tmp_path: Path) -> None:
    other = signed(tmp_path / "other", name="proa-gateway")
    with running_mover(tls=tls_of(other)) as source, running_mover(tls=tls_of(made[0], authority=other)) as target:
        source.store(CHAIN)
        assert "Hostname mismatch" in error_of(source, target)


def test_a_client_without_a_certificate_gets_nothing(made: tuple[Certificate, Certificate]) -> None:
    context = ssl.create_default_context(cafile=made[0].authority)
    with running_mover(tls=tls_of(made[0])) as source:
        source.store(CHAIN)
        with (
            socket.create_connection(("127.0.0.1", source.port), timeout=10) as connection,
            context.wrap_socket(connection, server_hostname="proa-engine") as wrapped,
        ):
            assert first_byte(wrapped, blocks_request(CHAIN)) == b""


def first_byte(connection: ssl.SSLSocket, request: bytes) -> bytes:
    """The first byte of the answer; empty if the peer has ended the connection."""
    try:
        connection.sendall(request)
        return connection.recv(1)
    except TimeoutError:
        raise
    except OSError:
        return b""


def test_renewed_certificates_are_used_for_new_connections(
    made: tuple[Certificate, Certificate], tmp_path: Path
) -> None:
    before, after = made
    secrets = [MountedSecret(tmp_path / name, before) for name in ("source", "target")]
    paths = [
        PeerTls(str(secret.files.certificate), str(secret.files.key), str(secret.files.authority)) for secret in secrets
    ]
    with running_mover(tls=paths[0]) as source, running_mover(tls=paths[1]) as target:
        source.store(CHAIN)
        assert error_of(source, target, 1) == ""
        secrets[0].put(after)
        assert "CERTIFICATE_VERIFY_FAILED" in error_of(source, target, 2)
        secrets[1].put(after)
        assert error_of(source, target, 3) == ""
        secrets[1].put_garbage()
        assert error_of(source, target, 4) == "", "files that are invalid are not used"


def test_a_cancelled_fetch_over_tls_ends_at_once(made: tuple[Certificate, Certificate]) -> None:
    tls = tls_of(made[0])
    with running_mover(tls=tls) as source, running_mover(tls=tls) as target:
        target.fetch(make_job(source, CHAIN, wait_ms=60_000))
        time.sleep(0.2)
        began = time.monotonic()
        target.cancel(1)
        assert target.fetched().error
        assert time.monotonic() - began < 5


def test_a_mover_without_valid_files_does_not_start(made: tuple[Certificate, Certificate]) -> None:
    certificate = made[0]
    wrong = PeerTls(str(certificate.certificate), str(made[1].key), str(certificate.authority))
    with pytest.raises(AssertionError, match="are not a certificate and its key in PEM"), running_mover(tls=wrong):
        pass
