"""TLS files: invalid files raise an error that names them; a failed reload keeps the previous identity."""

import logging
import re
import subprocess
from pathlib import Path

import pytest

from proa.tls import TlsFiles, TlsSource
from support.certificates import Certificate, signed
from support.mounted_secret import MountedSecret


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return signed(tmp_path_factory.mktemp("first") / "made")


@pytest.fixture(scope="module")
def second(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return signed(tmp_path_factory.mktemp("second") / "made")


def test_the_identity_is_the_content_of_the_files(first: Certificate, tmp_path: Path) -> None:
    identity = TlsSource(MountedSecret(tmp_path / "tls", first).files).current()
    assert identity.certificate == first.certificate.read_bytes()
    assert identity.key == first.key.read_bytes()
    assert identity.authority == first.authority.read_bytes()


def test_a_certificate_needs_its_key(first: Certificate) -> None:
    with pytest.raises(ValueError, match="both --tls-cert and --tls-key"):
        TlsFiles(certificate=first.certificate)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ca.crt"
    with pytest.raises(ValueError, match=f"cannot read {re.escape(str(path))}: No such file"):
        TlsSource(TlsFiles(authority=path))


def test_a_key_of_another_certificate_is_rejected(first: Certificate, second: Certificate) -> None:
    with pytest.raises(ValueError, match="are not a certificate and its key in PEM"):
        TlsSource(TlsFiles(certificate=first.certificate, key=second.key))


def test_a_key_with_a_password_is_rejected_without_a_prompt(first: Certificate, tmp_path: Path) -> None:
    locked = tmp_path / "locked.key"
    command = ["openssl", "ec", "-aes256", "-passout", "pass:secret", "-in", str(first.key), "-out", str(locked)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    with pytest.raises(ValueError, match="are not a certificate and its key in PEM"):
        TlsSource(TlsFiles(certificate=first.certificate, key=locked))


def test_an_authority_that_is_not_a_certificate_is_rejected(first: Certificate) -> None:
    with pytest.raises(ValueError, match="holds no certificates in PEM"):
        TlsSource(TlsFiles(authority=first.key))


def test_changed_files_are_reloaded_and_unchanged_ones_give_the_same_object(
    first: Certificate, second: Certificate, tmp_path: Path
) -> None:
    secret = MountedSecret(tmp_path / "tls", first)
    source = TlsSource(secret.files)
    before = source.current()
    assert source.current() is before
    secret.put(second)
    assert source.current().certificate == second.certificate.read_bytes()


def test_files_that_become_invalid_are_logged_once_and_the_old_ones_stay_in_use(
    first: Certificate, second: Certificate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    secret = MountedSecret(tmp_path / "tls", first)
    source = TlsSource(secret.files)
    before = source.current()
    secret.put_garbage()
    with caplog.at_level(logging.ERROR):
        assert source.current() is source.current() is before
    (record,) = caplog.records
    assert "TLS certificates not reloaded" in record.message
    secret.put(second)
    assert source.current().key == second.key.read_bytes()
