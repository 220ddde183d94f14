"""Object stores: the files under a prefix of an S3, Google Cloud Storage or Azure bucket, and one sentence for each way
in which a store refuses.

The library is obstore, the binding of Rust's object_store: one package of 16 MB for all three stores. fsspec's backends
(s3fs, gcsfs, adlfs) are 55 packages of 98 MB. Run:ai's streamer needs boto3 and torch, and keeps no files, so that each
rank and each start reads the bucket again. obstore does not show the stores' digest headers: see `object_download` for
what is checked.

Endpoint and credentials come from the environment (AWS_*, GOOGLE_*, AZURE_*), those of S3 then from the files of
`aws configure`, then from the workload's identity.
"""

import logging
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from threading import Event
from typing import Any, Self
from urllib.parse import quote

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from proa_engine.sources import aws_files, daemon_threads
from proa_engine.sources.object_urls import store_of

_CREDENTIALS = {
    "S3": "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE, or AWS_SKIP_SIGNATURE=true for a public bucket",
    "Google Cloud Storage": "GOOGLE_APPLICATION_CREDENTIALS, or GOOGLE_SKIP_SIGNATURE=true for a public bucket",
    "Azure Blob Storage": (
        "AZURE_STORAGE_ACCOUNT_KEY or AZURE_STORAGE_SAS_KEY, or AZURE_SKIP_SIGNATURE=true for a public container"
    ),
}
# Requests for a workload's identity: instance metadata, Amazon's containers and STS, Google's and Microsoft's tokens.
_IDENTITY = re.compile(
    r"169\.254\.|metadata\.google\.internal|/computeMetadata/|token request|AssumeRoleWithWebIdentity|//sts\.|"
    r"oauth2|InstanceCredential|WebIdentity|/latest/api/token",
)
_CODE = re.compile(r"<Code>(\w+)</Code>")
_STATUS = re.compile(r"status code: (\d{3})")
_SYSTEM = re.compile(r'(?:message|error): "([^"]+)"')
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_DENIED = frozenset(
    {
        "AccessDenied",
        "AuthenticationFailed",
        "AuthorizationFailure",
        "AuthorizationPermissionMismatch",
        "ExpiredToken",
        "InvalidAccessKeyId",
        "InvalidToken",
        "NoAuthenticationInformation",
        "PublicAccessNotPermitted",
        "SignatureDoesNotMatch",
    }
)
_OTHER_REGION = frozenset({"AuthorizationHeaderMalformed", "IllegalLocationConstraintException", "PermanentRedirect"})
_MIN_CHUNK = 1 << 20  # bytes that are passed on at once
_MAX_OBJECTS = 100_000  # under a prefix; a model has at most some hundreds
_LIST_SECONDS = 600.0  # 1,000 objects come in a fraction of a second; a store that does not answer is tried for minutes
_MAX_ERROR = 20_000  # characters of a store's answer that are looked at
_log = logging.getLogger(__name__)


class ObjectStoreError(ValueError):
    """The store refused, or has not what is looked for. The message is a sentence for the user."""


class StoreUnreachable(ObjectStoreError):
    """The store did not answer, or answered that it cannot work now."""


class ObjectChanged(Exception):
    """An object is not the one that was listed."""


@dataclass(frozen=True, slots=True)
class ObjectFile:
    """`name`: relative to the prefix. `version`: the ETag without quotes, or the time of the last change of an object
    without one; it changes with the content."""

    name: str
    size: int
    version: str


class ObjectFolder:
    """The objects under a prefix. Methods may be called by several threads. Raises ObjectStoreError."""

    def __init__(self, url: str, store: ObjectStore) -> None:
        self.url = url
        self._store = store

    @classmethod
    def open(cls, url: str) -> Self:
        """`url`: SCHEME://BUCKET/PREFIX, or abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX. Sends no request."""
        _check_url(url)
        # Endpoints are https unless the user names one that is not.
        client: Any = {"allow_http": True, "connect_timeout": "5s", "read_timeout": "60s", "timeout": "3600s"}
        retries: Any = {"max_retries": 5, "retry_timeout": timedelta(minutes=3)}
        options: Any = {}
        if store_of(url) == "S3":
            try:
                profile = aws_files.read_profile(os.environ)
                options = aws_files.store_options(os.environ, profile)
                if authorities := aws_files.read_authorities(os.environ, profile):
                    client["root_certificate"] = authorities
            except ValueError as error:
                raise ObjectStoreError(f"{url}: {error}") from error
        try:
            return cls(url, from_url(url, config=options, client_options=client, retry_config=retries))
        except (BaseError, ValueError, OSError) as error:
            raise explain(url, error) from error

    def files(self) -> list[ObjectFile]:
        """Return the objects under the prefix, also those in folders, by name."""
        found, stop = list[Any](), Event()

        def list_all() -> None:
            for page in obstore.list(self._store):
                found.extend(page)
                if stop.is_set():
                    return
                if len(found) > _MAX_OBJECTS:
                    raise ObjectStoreError(f"{self.url}: there are more than {_MAX_OBJECTS:,} objects under the prefix")

        try:
            daemon_threads.run([list_all], 1, stop, seconds=_LIST_SECONDS)
        except daemon_threads.NotDone as error:
            raise StoreUnreachable(
                f"{self.url}: the list of objects has not ended after {_LIST_SECONDS:.0f} s"
            ) from error
        except (BaseError, OSError) as error:
            raise explain(self.url, error) from error
        files = [ObjectFile(each["path"], each["size"], _version(each)) for each in found]
        if refused := [each.name for each in files if not _is_relative(each.name)]:
            count = len(refused)
            _log.warning(
                "%s: not reading %d objects whose names no file can have, first %r", self.url, count, refused[0]
            )
        return sorted((each for each in files if _is_relative(each.name)), key=lambda each: each.name)

    def read(self, file: ObjectFile, start: int, end: int) -> Iterator[bytes]:
        """Yield the bytes from `start` up to `end` in pieces. Raises ObjectChanged if the object is another version.

        The ETag of the answer is compared, because not every store that speaks S3 knows If-Match.
        """
        try:
            if not file.size:
                answer = obstore.get(self._store, file.name)
            else:
                answer = obstore.get(self._store, file.name, options={"range": (start, end)})
            if answer.meta["size"] != file.size or _version(answer.meta) != file.version:
                raise ObjectChanged(file.name)
            yield from answer.stream(min_chunk_size=_MIN_CHUNK)
        except FileNotFoundError as error:
            raise ObjectChanged(file.name) from error
        except (BaseError, OSError) as error:
            raise explain(self.url, error) from error


def explain(url: str, error: BaseException) -> ObjectStoreError:
    """Return the sentence for an error of obstore."""
    text, _, details = str(error)[:_MAX_ERROR].partition("\n\nDebug source:")
    found = _CODE.search(text)
    code = found[1] if found else ""
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    store = store_of(url) or "S3"
    if "Account must be specified" in text:
        return ObjectStoreError(
            f"{url} names no account: set AZURE_STORAGE_ACCOUNT_NAME, or write "
            "abfs://CONTAINER@ACCOUNT.dfs.core.windows.net/PREFIX"
        )
    if _IDENTITY.search(text):
        return ObjectStoreError(
            f"{url}: no credentials for {store}: set {_CREDENTIALS[store]}, or give the workload an identity; "
            f"the request for one failed: {_reason(text, details)}"
        )
    if code in ("NoSuchBucket", "ContainerNotFound") or (status == 404 and "list request" in text):
        return ObjectStoreError(f"{url}: there is no such {'container' if store.startswith('Azure') else 'bucket'}")
    if code in _OTHER_REGION or status == 301:
        return ObjectStoreError(f"{url}: the bucket is in another region: set AWS_REGION ({_reason(text, details)})")
    if code in _DENIED or status in (401, 403):
        return ObjectStoreError(
            f"{url}: access denied ({code or status}); the engine must be allowed to list the prefix and read it"
        )
    if status >= 500 or "HTTP error" in text or isinstance(error, TimeoutError):
        return StoreUnreachable(f"{url}: the store cannot be reached: {_reason(text, details)}{_endpoint(store)}")
    return ObjectStoreError(f"{url} could not be read: {_reason(text, details)}")


def _check_url(url: str) -> None:
    """Raise ObjectStoreError for parts that the library would ignore. The message leaves them out: they may be keys."""
    known, mark, _ = re.split(r"([?#]|$)", url, maxsplit=1)
    if mark:
        raise ObjectStoreError(
            f"{known}{mark}…: nothing can follow {mark} in the URL of a bucket: versions of objects cannot be chosen, "
            f"credentials are read from the environment, and a {mark} in a name is written {quote(mark)}"
        )
    scheme, _, path = known.partition("://")
    bucket, colon, _ = path.partition("/")[0].partition(":")
    if colon:
        raise ObjectStoreError(
            f"{scheme}://{bucket}:…: a bucket has neither a port nor a password: the store's address "
            "and credentials are read from the environment"
        )


def _version(meta: Any) -> str:
    # Azure's lists have ETags without quotes, its answers with them.
    tag = meta["e_tag"]
    return str(tag).removeprefix("W/").strip('"') if tag else meta["last_modified"].isoformat()


def _is_relative(name: str) -> bool:
    """False for a name that is no file in a folder, such as one with `..` or a line break."""
    return name.isprintable() and not any(part in ("", ".", "..") for part in name.split("/"))


def _reason(text: str, details: str) -> str:
    """The library's error in one line, with the operating system's reason, which it has among the details."""
    line = " ".join(re.sub(r"<\?xml.*?\?>|</?\w+>", " ", text).split())
    if certificate := _CERTIFICATE.search(details):
        return f"{line[:300]} (its certificate is not trusted: {certificate[1]}; SSL_CERT_FILE names the authorities)"
    system = _SYSTEM.search(details)
    return line[:300] + (f" ({system[1]})" if system else "")


def _endpoint(store: str) -> str:
    """The endpoint that the user has set, which may be the wrong one."""
    if store != "S3":
        return ""
    names = ("AWS_ENDPOINT_URL_S3", "AWS_ENDPOINT_URL", "AWS_ENDPOINT")
    name = next((each for each in names if os.environ.get(each)), None)
    return f"; {name} is {os.environ[name]}" if name else ""
