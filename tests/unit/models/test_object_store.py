"""Each way in which an object store refuses has a sentence of its own; other versions of an object are not read."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
from obstore.exceptions import GenericError
from obstore.store import MemoryStore, S3Store

from proa_engine.config import EngineConfig
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.option_groups import Downloads
from proa_engine.sources import object_store
from proa_engine.sources.object_store import (
    ObjectChanged,
    ObjectFile,
    ObjectFolder,
    ObjectStoreError,
    StoreUnreachable,
    explain,
)
from proa_engine.sources.resolve import (
    LocalFolder,
    ObjectPrefix,
    download_model,
    resolve_lora,
    resolve_model,
    source_of,
)
from support.processes import free_port

URL = "s3://bucket/model"


class FakeStore(BaseHTTPRequestHandler):
    """Answers all requests with `status` and an error of this `code`, as S3, Google and Azure write it."""

    status = 404
    code = ""

    def do_GET(self) -> None:
        body = f"<?xml version='1.0'?><Error><Code>{self.code}</Code><Message>No.</Message></Error>".encode()
        self.send_response(self.status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Iterator[type[FakeStore]]:
    handler = type("Handler", (getattr(request, "param", FakeStore),), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    set_endpoint(monkeypatch, server.server_port)
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


def set_endpoint(monkeypatch: pytest.MonkeyPatch, port: int) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{port}")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):  # of who runs the tests
        monkeypatch.setenv(name, "/nowhere")


@pytest.mark.parametrize(
    ("status", "code", "sentence"),
    [
        (404, "NoSuchBucket", f"{URL}: there is no such bucket"),
        (
            403,
            "AccessDenied",
            f"{URL}: access denied \\(AccessDenied\\); the engine must be allowed to list the prefix",
        ),
        (403, "SignatureDoesNotMatch", f"{URL}: access denied \\(SignatureDoesNotMatch\\)"),
        (400, "ExpiredToken", f"{URL}: access denied \\(ExpiredToken\\)"),
        (400, "AuthorizationHeaderMalformed", f"{URL}: the bucket is in another region: set AWS_REGION"),
        (400, "Strange", f"{URL} could not be read: .*Strange"),
    ],
)
def test_an_answer_of_the_store_is_one_sentence(status: int, code: str, sentence: str, store: type[FakeStore]) -> None:
    store.status, store.code = status, code
    with pytest.raises(ObjectStoreError, match=sentence) as raised:
        ObjectFolder.open(URL).files()
    assert "\n" not in str(raised.value)
    assert not isinstance(raised.value, StoreUnreachable)


def test_an_endpoint_that_cannot_be_reached_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    port = free_port()
    set_endpoint(monkeypatch, port)
    sentence = rf"the store cannot be reached: .*Connection refused.*; AWS_ENDPOINT_URL is http://127.0.0.1:{port}$"
    with pytest.raises(StoreUnreachable, match=sentence):
        ObjectFolder.open(URL).files()


class ListingStore(FakeStore):
    """Answers each request for a list with a page of `keys`, as if more pages followed."""

    keys: tuple[str, ...] = ()
    num_pages = 0

    def do_GET(self) -> None:
        type(self).num_pages += 1
        date = "<LastModified>2026-01-01T00:00:00.000Z</LastModified><ETag>&quot;e&quot;</ETag><Size>1</Size>"
        contents = "".join(f"<Contents><Key>model/{key}</Key>{date}</Contents>" for key in self.keys)
        more = "<IsTruncated>true</IsTruncated><NextContinuationToken>next</NextContinuationToken>"
        body = f"<ListBucketResult>{contents}{more}</ListBucketResult>".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@pytest.mark.parametrize("store", [ListingStore], indirect=True)
def test_a_list_that_does_not_end_is_refused(store: type[ListingStore], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, "_MAX_OBJECTS", 5000)
    store.keys = tuple(f"{number}.json" for number in range(1000))
    with pytest.raises(ObjectStoreError, match=f"{URL}: there are more than 5,000 objects under the prefix"):
        ObjectFolder.open(URL).files()
    assert store.num_pages < 100

    monkeypatch.setattr(object_store, "_LIST_SECONDS", 0.2)
    store.keys = ()
    with pytest.raises(StoreUnreachable, match=f"{URL}: the list of objects has not ended after 0 s"):
        ObjectFolder.open(URL).files()


def test_names_that_no_file_can_have_are_not_read() -> None:
    names = [
        "../up.json",
        "a/../../b.json",
        "/etc/x.json",
        "a//b.json",
        "./c.json",
        "two\nlines.json",
        "nul\0.json",
        "",
    ]
    assert not [name for name in names if object_store._is_relative(name)]
    assert object_store._is_relative("1_Pooling/config.json")


@pytest.mark.parametrize(
    ("detail", "reason"),
    [
        ('Custom { error: "failed to lookup address information" }', "(failed to lookup address information)"),
        (
            "InvalidCertificate(\n  UnknownIssuer,\n)",
            "(its certificate is not trusted: UnknownIssuer; SSL_CERT_FILE names",
        ),
    ],
)
def test_the_reason_of_a_failed_connection_is_taken_from_the_details(detail: str, reason: str) -> None:
    error = GenericError(f"Generic S3 error: HTTP error: error sending request\n\nDebug source:\n{detail}")
    assert reason in str(explain(URL, error))


def test_without_credentials_the_variables_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """The identity of the machine is asked for at an address that refuses."""
    set_endpoint(monkeypatch, free_port())
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_METADATA_ENDPOINT", f"http://127.0.0.1:{free_port()}")
    sentence = "no credentials for S3: set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_S"
    with pytest.raises(ObjectStoreError, match=sentence):
        ObjectFolder.open(URL).files()


def test_a_container_without_an_account_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AZURE_STORAGE_ACCOUNT_NAME", "AZURE_STORAGE_ENDPOINT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ObjectStoreError, match="az://c/model names no account: set AZURE_STORAGE_ACCOUNT_NAME"):
        resolve_model("az://c/model")


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("s3://bucket/model?versionId=1", r"s3://bucket/model\?…: nothing can follow \? .* is written %3F$"),
        ("gs://bucket/model#1", "gs://bucket/model#…: nothing can follow # in the URL of a bucket: .* is written %23$"),
        ("s3://host:9000/bucket", "s3://host:…: a bucket has neither a port nor a password: the store's address and"),
        ("s3://key:secret@bucket/model", "s3://key:…: a bucket has neither a port nor a password"),
    ],
)
def test_parts_of_a_url_that_would_be_ignored_are_refused(url: str, sentence: str) -> None:
    with pytest.raises(ObjectStoreError, match=sentence) as raised:
        resolve_model(url)
    assert not any(part in str(raised.value) for part in ("versionId", "secret", "9000"))
    with pytest.raises(LoraNotFound, match=sentence):
        resolve_lora(url)


def test_marks_in_the_names_of_objects_are_written_with_percent() -> None:
    opened = ObjectFolder.open("s3://bucket/a%3Fb%23c")
    assert isinstance(opened._store, S3Store)
    assert opened._store.prefix == "a?b#c"


@pytest.mark.parametrize("file", [ObjectFile("a", 3, "0"), ObjectFile("a", 4, "1"), ObjectFile("b", 3, "1")])
def test_an_object_that_is_not_the_listed_one_is_not_read(file: ObjectFile) -> None:
    memory = MemoryStore()
    for data in (b"old", b"new"):
        memory.put("a", data)
    source = ObjectFolder(URL, memory)
    (listed,) = source.files()
    assert b"".join(source.read(listed, 1, 3)) == b"ew"
    with pytest.raises(ObjectChanged):
        list(source.read(file, 0, 3))


@pytest.mark.parametrize("scheme", ["s3", "s3a", "gs", "az", "abfs", "abfss", "S3"])
def test_urls_of_object_stores_are_known(scheme: str) -> None:
    assert source_of(f"{scheme}://bucket/model") == ObjectPrefix(f"{scheme}://bucket/model")
    assert isinstance(source_of("builtin"), LocalFolder)


def test_an_object_store_has_no_revisions() -> None:
    with pytest.raises(ValueError, match="revision v2: s3://bucket/model has no revisions; give each version a prefix"):
        resolve_model(URL, "v2")


def test_the_tokenizer_of_another_source_has_no_revision(store: type[FakeStore]) -> None:
    store.code = "NoSuchBucket"
    config = EngineConfig(model="builtin", revision="v2", tokenizer=URL)
    with pytest.raises(ObjectStoreError, match="there is no such bucket"):
        download_model(config)


@pytest.mark.parametrize("parts", [["model.gguf"], ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"]])
def test_a_gguf_file_is_downloaded_with_its_other_parts_alone(
    parts: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = MemoryStore()
    for name in (*parts, "other.gguf", "config.json"):
        store.put(name, name.encode())
    monkeypatch.setattr(ObjectFolder, "open", lambda url: ObjectFolder(url, store))
    downloads = Downloads(download_dir=str(tmp_path))
    for part in parts:
        path = resolve_model(f"{URL}/{part}", downloads=downloads)
        assert path.name == parts[0]
        assert sorted(each.name for each in path.parent.iterdir()) == parts
    assert resolve_model(f"{URL}/other.gguf", downloads=downloads).read_bytes() == b"other.gguf"
    with pytest.raises(ObjectStoreError, match=f"there is no absent.gguf under {URL}"):
        resolve_model(f"{URL}/absent.gguf", downloads=downloads)


def test_an_adapter_that_cannot_be_had_is_not_found(store: type[FakeStore]) -> None:
    store.code = "NoSuchBucket"
    with pytest.raises(LoraNotFound, match="s3://bucket/sql: there is no such bucket"):
        resolve_lora("s3://bucket/sql")
