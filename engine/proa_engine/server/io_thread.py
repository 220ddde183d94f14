"""IoThread: the thread that does all gRPC input and output, with an event loop of its own.

It serves health before the model is loaded, and while the main thread hangs.
"""

import asyncio
import threading
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

import grpc
from grpc_health.v1 import health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from proa.engine.v1 import service_pb2_grpc
from proa.tls import TlsIdentity, TlsSource
from proa_engine.preflight.ports import why_unusable
from proa_engine.server import convert
from proa_engine.server.health import Health
from proa_engine.server.servicer import DecodingInterceptor, EngineServicer

T = TypeVar("T")

SERVER_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_ping_strikes", 0),
    # A client whose node lost power sends no FIN. Detect it, so that its requests are aborted and their blocks freed.
    ("grpc.keepalive_time_ms", 5000),
    ("grpc.keepalive_timeout_ms", 3000),
    ("grpc.http2.ping_timeout_ms", 3000),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
)


def server_credentials(source: TlsSource) -> grpc.ServerCredentials:
    """Credentials that are checked for new files at each connection. With an authority, clients must show a
    certificate that it signed."""
    used = source.current()

    def fetch() -> grpc.ServerCertificateConfiguration | None:
        """Return the configuration, or `None` if unchanged. gRPC calls this on its own threads, one at a time."""
        nonlocal used
        identity = source.current()
        if identity is used:
            return None
        used = identity
        return _configuration(identity)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(used),
        fetch,  # type: ignore[arg-type]  # the stub does not allow None
        require_client_authentication=used.authority is not None,
    )


def _configuration(identity: TlsIdentity) -> grpc.ServerCertificateConfiguration:
    assert identity.key is not None
    assert identity.certificate is not None
    return grpc.ssl_server_certificate_configuration(
        [(identity.key, identity.certificate)], root_certificates=identity.authority
    )


class IoThread:
    """Owns the gRPC server."""

    def __init__(
        self,
        address: str,
        servicer: EngineServicer,
        health: Health,
        *,
        max_message_bytes: int,
        credentials: grpc.ServerCredentials | None = None,
        health_address: str | None = None,
    ) -> None:
        """A larger message than `max_message_bytes` ends its call with RESOURCE_EXHAUSTED. `credentials` None:
        plaintext. `health_address` serves the health service alone, in plaintext; None: it is served at `address` only.
        """
        self._address = address
        self._options = (*SERVER_OPTIONS, ("grpc.max_receive_message_length", max_message_bytes))
        self._credentials = credentials
        self._health_address = health_address
        self._servicer = servicer
        self._health = health
        self._loop = asyncio.new_event_loop()
        self._started: Future[int] = Future()
        self._stop = asyncio.Event()
        self._grace = 0.0
        self._thread = threading.Thread(target=self._run, name="proa-io", daemon=True)

    def start(self) -> int:
        """Start serving; return the bound port. Raises OSError if the address cannot be bound."""
        self._thread.start()
        return self._started.result()

    def call_soon(self, function: Callable[..., object], *args: object) -> None:
        """Schedule a function on this thread. Callable from any thread."""
        self._loop.call_soon_threadsafe(function, *args)

    def run(self, work: Coroutine[Any, Any, T]) -> "Future[T]":
        """Schedule a coroutine on this thread. Callable from any thread."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def add_reader(self, descriptor: int, function: Callable[[], None]) -> None:
        """Call a function on this thread whenever the descriptor is readable. Callable from any thread."""
        self.call_soon(self._loop.add_reader, descriptor, function)

    def stop(self, grace: float) -> None:
        """Stop the servers, cancel calls that last longer than `grace` seconds, and join the thread."""
        self._grace = grace
        self.call_soon(self._stop.set)
        self._thread.join()

    def _run(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        servers = [grpc.aio.server(options=self._options, interceptors=(DecodingInterceptor(),))]
        server = servers[0]
        service_pb2_grpc.add_EngineServiceServicer_to_server(self._servicer, server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, server)
        names = (convert.SERVICE, "grpc.health.v1.Health", reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, server)
        await self._health.update()
        try:
            port = _bind(server, self._address, self._credentials, "gRPC", "--port")
            if self._health_address is not None:
                servers.append(grpc.aio.server(options=SERVER_OPTIONS))
                health_pb2_grpc.add_HealthServicer_to_server(self._health.servicer, servers[1])
                _bind(servers[1], self._health_address, None, "health", "--health-port")
        except OSError as error:
            self._started.set_exception(error)
            return
        await asyncio.gather(*(server.start() for server in servers))
        self._started.set_result(port)
        await self._stop.wait()
        await asyncio.gather(*(server.stop(self._grace) for server in servers))


def _bind(
    server: grpc.aio.Server, address: str, credentials: grpc.ServerCredentials | None, what: str, flag: str
) -> int:
    try:
        if credentials is None:
            return server.add_insecure_port(address)
        return server.add_secure_port(address, credentials)
    except RuntimeError as error:  # which does not say why
        host, _, port = address.rpartition(":")
        reason = why_unusable(host.strip("[]"), int(port)) or str(error)
        raise OSError(f"cannot serve {what} on {address} ({flag}): {reason}") from None
