"""What `aws configure` wrote is used as by boto3: after variables, and before an identity of the machine."""

import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest
from obstore.store import S3Store

from proa_engine.sources.object_store import ObjectFolder, ObjectStoreError, StoreUnreachable
from support.certificates import signed

URL = "s3://bucket/model"
CREDENTIALS = """
[default]
aws_access_key_id = KEY
aws_secret_access_key = SEC%RET
[other]
aws_access_key_id = OTHER
aws_secret_access_key = HIDDEN
aws_session_token = TOKEN
"""
CONFIG = """
[default]
region = eu-west-1
s3 =
  max_concurrent_requests = 20
[profile other]
region = eu-central-1
endpoint_url = https://store.example:9000
[profile "by sso"]
sso_session = work
region = eu-west-3
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home with the files, and no variables of AWS."""
    for name in ("ACCESS_KEY_ID", "SECRET_ACCESS_KEY", "ENDPOINT_URL", "REGION", "PROFILE"):
        monkeypatch.delenv(f"AWS_{name}", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".aws").mkdir()
    (tmp_path / ".aws/credentials").write_text(CREDENTIALS)
    (tmp_path / ".aws/config").write_text(CONFIG)
    return tmp_path


def opened() -> dict[str, Any]:
    store = ObjectFolder.open(URL)._store
    assert isinstance(store, S3Store)
    return {name: value for name, value in store.config.items() if name not in ("bucket", "prefix")}


def test_the_default_profile_is_used(home: Path) -> None:
    assert opened() == {"access_key_id": "KEY", "secret_access_key": "SEC%RET", "region": "eu-west-1"}


def test_another_profile_is_named_by_a_variable(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    keys = {"access_key_id": "OTHER", "secret_access_key": "HIDDEN", "session_token": "TOKEN"}
    assert opened() == keys | {"region": "eu-central-1", "endpoint": "https://store.example:9000"}


def test_the_files_may_be_elsewhere(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / ".aws").rename(home / "mounted")
    assert not opened()
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(home / "mounted/credentials"))
    monkeypatch.setenv("AWS_CONFIG_FILE", "~/mounted/config")
    assert opened() == {"access_key_id": "KEY", "secret_access_key": "SEC%RET", "region": "eu-west-1"}


def test_variables_come_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "other")
    for name, value in {
        "ACCESS_KEY_ID": "MINE",
        "SECRET_ACCESS_KEY": "S",
        "REGION": "us-east-2",
        "ENDPOINT_URL": "http://here",
    }.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    assert not {"OTHER", "HIDDEN", "TOKEN", "eu-central-1", "https://store.example:9000"} & {*opened().values()}


@pytest.mark.parametrize(
    ("profile", "sentence"),
    [
        ("nobody", "AWS_PROFILE is nobody, but there is no such profile in the files of `aws configure`"),
        ("by sso", "the profile has sso_session, which is not supported: set the variables that `aws configure export"),
    ],
)
def test_a_profile_that_cannot_be_used_is_one_sentence(
    profile: str, sentence: str, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_PROFILE", profile)
    with pytest.raises(ObjectStoreError, match=f"{URL}: {sentence}"):
        ObjectFolder.open(URL)


def test_a_file_that_is_not_one_of_profiles_is_named(home: Path) -> None:
    (home / ".aws/config").write_text("region = eu-west-1")
    with pytest.raises(ObjectStoreError, match=r"~/\.aws/config cannot be read: File contains no section headers"):
        ObjectFolder.open(URL)


class Refuse(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(403)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The certificate of who signed that of a store, which refuses all requests."""
    certificate = signed(tmp_path / "certificates", "localhost")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate.certificate, certificate.key)
    server = HTTPServer(("127.0.0.1", 0), Refuse)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.handle_error = lambda *_: None  # type: ignore[method-assign]  # a client that does not trust it
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"https://localhost:{server.server_port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "localhost")
    yield certificate.authority
    server.shutdown()
    server.server_close()
    thread.join()


def test_an_authority_of_ones_own_is_trusted(authority: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(StoreUnreachable, match=r"its certificate is not trusted: .* SSL_CERT_FILE"):
        ObjectFolder.open(URL).files()
    monkeypatch.setenv("AWS_CA_BUNDLE", str(authority))
    with pytest.raises(ObjectStoreError, match=r"access denied \(403\)"):
        ObjectFolder.open(URL).files()
    monkeypatch.setenv("AWS_CA_BUNDLE", "/nowhere")
    with pytest.raises(ObjectStoreError, match=r"/nowhere \(AWS_CA_BUNDLE\) cannot be read: No such file"):
        ObjectFolder.open(URL)
