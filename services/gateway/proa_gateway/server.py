"""Runs the application under uvicorn until SIGINT or SIGTERM, then drains it."""

import asyncio
import gc
import logging
import resource
import signal
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import version

import uvicorn
import uvloop

from proa.addresses import host_and_port
from proa.logs import with_fields
from proa.plugins import Group, log_installed
from proa.wsgi_server import serve_wsgi
from proa_gateway.apis.routes import ERROR_FORMS
from proa_gateway.app import create_app
from proa_gateway.config import GatewayConfig
from proa_gateway.gateway import Gateway
from proa_gateway.http.probes import Progress, probe_app
from proa_gateway.http.protocol import HttpProtocol

BACKLOG = 2048
THREAD_STACK = 8 * 2**20  # bytes, which `proa.grammar.check` needs. With `ulimit -s unlimited` the default is less.
KEEP_ALIVE = 75  # seconds; longer than load balancers keep idle connections, so that they close them first
SWITCH_INTERVAL = 0.0005
"""Seconds for which another thread keeps the interpreter lock while the event loop waits for it, after each system call
of the loop. Python's 5 ms add up to 100 ms a token while large schemas are checked."""
_log = logging.getLogger(__name__)


class _Server(uvicorn.Server):
    """uvicorn's server with signal handlers of its own. uvicorn's handlers raise the signal again after shutdown, so a
    clean shutdown would look like a death by signal. It tells `progress` that its event loop runs."""

    def __init__(self, settings: uvicorn.Config, progress: Progress) -> None:
        super().__init__(settings)
        self._progress = progress

    async def on_tick(self, counter: int) -> bool:
        """Called ten times a second while requests are served."""
        gateway: Gateway = self.lifespan.state["gateway"]
        self._progress.beat(accepts=gateway.admission.ready)
        return await super().on_tick(counter)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in (signal.SIGINT, signal.SIGTERM):
                loop.remove_signal_handler(number)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        names = [each.getsockname() for server in self.servers for each in server.sockets]
        gateway: Gateway = self.lifespan.state["gateway"]
        _log_start(gateway.config, [host_and_port(*name[:2]) for name in names])

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Reject waiting requests; running ones have until the shutdown deadline."""
        gateway: Gateway | None = self.lifespan.state.get("gateway")
        if gateway is not None:
            gateway.admission.queue.close()
            gateway.admission.session_queue.close()
        await super().shutdown(sockets)

    def _on_signal(self) -> None:
        """The first signal drains, a second one stops at once."""
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._progress.drain()
        _log.info("shutting down")


def _log_start(config: GatewayConfig, addresses: Sequence[str]) -> None:
    own_version = version("proa-gateway")
    text = f"proa-gateway {own_version} listening on {', '.join(addresses)}, engines: "
    text += ", ".join(config.engines) or f"those of the Service {config.engine_service}"
    models = [*config.models, *(lora.name for lora in config.lora_modules)]
    text += f", models and adapters before engines report them: {', '.join(models)}" if models else ""
    fields = with_fields(
        version=own_version,
        addresses=addresses,
        engines=config.engines or None,
        engine_service=config.engine_service or None,
        models=models or None,
    )
    _log.info("%s", text, extra=fields)
    log_installed(_log, (Group.TOOL_FORMATS, Group.REASONING_FORMATS))


def make_server(config: GatewayConfig, progress: Progress | None = None) -> uvicorn.Server:
    """A server whose `serve()` ends after SIGINT or SIGTERM, when all requests have ended or the shutdown deadline has
    passed. It reports to `progress`."""
    settings = uvicorn.Config(
        create_app(config),
        host=config.host,
        port=config.port,
        http=type("HttpProtocol", (HttpProtocol,), {"send_seconds": config.deadlines.send, "error_forms": ERROR_FORMS}),
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        date_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=round(config.deadlines.shutdown),
    )
    return _Server(settings, progress or Progress())


def serve(config: GatewayConfig) -> None:
    prepare_process()
    progress = Progress()
    server = make_server(config, progress)
    if config.health_port:
        try:
            serve_wsgi(probe_app(progress), config.host, config.health_port, name="proa-probes")
        except OSError as error:
            sys.exit(
                f"proa-gateway: error: cannot serve probes on {config.host}:{config.health_port} "
                f"(--health-port): {error.strerror or error}"
            )
    if config.scaler.scaler_port:
        _check_port(config.host, config.scaler.scaler_port)
    gc.collect()
    gc.freeze()  # the application's routes and classes: a full collection would pause all streams for 100 ms
    uvloop.run(server.serve())


def _check_port(host: str, port: int) -> None:
    """Exit if the scaler, which starts with the application, could not listen there."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except OSError as error:
            sys.exit(f"proa-gateway: error: cannot listen on {host}:{port} (--scaler-port): {error.strerror}")


def prepare_process() -> None:
    """Set the limits that a gateway needs. Each stream is an open file, and the default soft limit is often 1,024."""
    threading.stack_size(THREAD_STACK)
    sys.setswitchinterval(SWITCH_INTERVAL)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
