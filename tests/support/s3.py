"""A server that speaks S3 (github.com/versity/versitygw, on a folder), and a proxy that counts what it sends."""

import socket
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import obstore
import pytest
from obstore.store import from_url

from support.processes import accepts, free_port, process

PROGRAM = Path(__file__).parents[2] / ".tools" / "bin" / "versitygw"
KEY, SECRET = "key", "secretsecret"


@dataclass(frozen=True, slots=True)
class S3Server:
    port: int

    def environment(self, port: int | None = None) -> dict[str, str]:
        """The variables of a client. `port`: of a proxy before the server."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port or self.port}",
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "NO_PROXY": "127.0.0.1",
        }

    def put(self, url: str, files: Mapping[str, Path | bytes]) -> None:
        """Upload files under a prefix, in one piece each."""
        store = from_url(
            url,
            endpoint=f"http://127.0.0.1:{self.port}",
            access_key_id=KEY,
            secret_access_key=SECRET,
            client_options={"allow_http": True},
        )
        for name, content in files.items():
            obstore.put(store, name, content, use_multipart=False)


@contextmanager
def s3_server(folder: Path, *buckets: str) -> Iterator[S3Server]:
    """Run a server that keeps objects in `folder`. Skips the tests if `scripts/with-tool` has not compiled it."""
    if not PROGRAM.exists():
        pytest.skip("not run: scripts/with-tool has not compiled versitygw")
    for name in ("objects", "metadata"):
        (folder / name).mkdir()
    for bucket in buckets:
        (folder / "objects" / bucket).mkdir()
    port = free_port()
    command = [str(PROGRAM), "--port", f"127.0.0.1:{port}", "--quiet", "--keep-alive", "posix"]
    command += ["--sidecar", str(folder / "metadata"), str(folder / "objects")]
    keys = {"ROOT_ACCESS_KEY": KEY, "ROOT_SECRET_KEY": SECRET}
    with process(command, is_ready=lambda: accepts(port), env=keys) as server:
        yield S3Server(port)
        server.kill()  # after SIGTERM it waits for its clients to close their connections


class Meter:
    """A TCP proxy that counts the bytes which the server sends, and holds back those beyond `limit` until `open`."""

    def __init__(self, port: int, limit: int | None = None) -> None:
        self._target = port
        self._limit = limit
        self._lock = threading.Lock()
        self._open = threading.Event()
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._server.getsockname()[1]
        self.num_bytes = 0
        self.is_full = threading.Event()

    def __enter__(self) -> "Meter":
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._open.set()
        self._server.shutdown(socket.SHUT_RDWR)  # wakes `accept`
        self._server.close()

    def open(self) -> None:
        self._open.set()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._server.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                threading.Thread(target=self._carry, args=(client, there, False), daemon=True).start()
                threading.Thread(target=self._carry, args=(there, client, True), daemon=True).start()

    def _carry(self, source: socket.socket, sink: socket.socket, counts: bool) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 18):
                if counts:
                    self._count(len(data))
                sink.sendall(data)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
            if counts:
                each.close()

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            is_over = self._limit is not None and self.num_bytes + num_bytes > self._limit
        if is_over:
            self.is_full.set()
            self._open.wait()
        with self._lock:
            self.num_bytes += num_bytes
