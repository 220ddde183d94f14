"""EngineServer: a serving process, wired from the server's parts.

The gRPC server answers at once, NOT_SERVING; then the model is loaded and warmed up, and the main thread steps until
the process leaves (see shutdown.py).
"""

import asyncio
import gc
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc
from prometheus_client import CollectorRegistry

from proa.contract import EngineCoreRequest
from proa.tls import TlsFiles, TlsSource
from proa.tokenizer_files import digest
from proa_engine.config import EngineConfig
from proa_engine.core.executor import Executor, ExecutorFailed
from proa_engine.core.validation import check_request
from proa_engine.engine_parts import EngineParts, load_engine
from proa_engine.metrics import CacheConfig, EngineMetrics, serve_metrics
from proa_engine.server.engine_loop import EngineLoop, Handoff
from proa_engine.server.health import SETTLE_SECONDS, Health
from proa_engine.server.io_thread import IoThread
from proa_engine.server.model_info import make_model_info, served_name
from proa_engine.server.observer import RequestObserver
from proa_engine.server.request_router import LoadedEngine, RequestRouter
from proa_engine.server.servicer import EngineServicer
from proa_engine.server.shutdown import FAREWELL_SECONDS, Shutdown
from proa_engine.server.signals import SignalPipe
from proa_engine.server.tls import server_credentials
from proa_engine.server.watchdog import STEP_SECONDS, StepLimits, Watchdog
from proa_engine.telemetry import EngineTracer
from proa_engine.tokenizer import read_tokenizer_files

Load = Callable[[EngineConfig, Callable[[str], None], Callable[[Executor], Executor]], EngineParts]

HOPE_SECONDS = 60.0  # for a late step of a single process
HOPE_SECONDS_PARALLEL = 0.0  # with several ranks, where late means that a collective hangs

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """What `proa-engine serve` was asked for. Times in seconds; `metrics_port` 0: no metrics; `health_port` 0: health
    only beside the rest. `tls` None: plaintext."""

    config: EngineConfig
    host: str = "0.0.0.0"
    port: int = 50051
    metrics_port: int = 9400
    health_port: int = 0
    tls: TlsFiles | None = None
    drain_timeout: float = 60.0
    step_timeout: float = STEP_SECONDS


class StartError(Exception):
    """The engine cannot start; says why in a sentence for the user."""


def serve(options: ServeOptions) -> int:
    """Serve until told to leave; the exit status. Raises StartError."""
    server = EngineServer(options)
    server.start()
    server.watch_signals()
    return server.run()


class EngineServer:
    """`load` and `exit_process` can be replaced in tests. Raises StartError."""

    def __init__(
        self,
        options: ServeOptions,
        *,
        load: Load = load_engine,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._options = options
        self._load = load
        self._started_at = time.monotonic()
        self._registry = CollectorRegistry()
        self._tracer = EngineTracer.from_environment(model_name=served_name(options.config))
        self._frontend = RequestRouter()
        self._health = Health()
        servicer = EngineServicer(self._frontend, self._on_session)
        self._io = IoThread(
            f"{options.host}:{options.port}",
            servicer,
            self._health,
            credentials=_credentials(options.tls),
            health_address=f"{options.host}:{options.health_port}" if options.health_port else None,
        )
        self._shutdown = Shutdown(
            self._frontend,
            self._health,
            run_on_io_thread=self._io.run,
            last_rites=self._tracer.shutdown,
            drain_timeout=options.drain_timeout,
            exit_process=exit_process,
        )

    def start(self) -> int:
        """Answer gRPC and metrics from now on; the gRPC port. Raises StartError where a port cannot be had."""
        host, metrics_port = self._options.host, self._options.metrics_port
        try:
            port = self._io.start()
            if metrics_port:
                serve_metrics(self._registry, host, metrics_port)
        except OSError as error:
            raise StartError(f"cannot listen on {host}: {error}") from error
        _log.info("listening on %s:%d", self._options.host, port)
        return port

    def watch_signals(self) -> None:
        """Leave on SIGTERM and SIGINT. Called on the main thread."""
        pipe = SignalPipe((signal.SIGTERM, signal.SIGINT), self._shutdown.on_signal)
        self._io.add_reader(pipe.fileno(), pipe.read)

    def request_stop(self) -> None:
        """What SIGTERM does, from any thread."""
        self._io.call_soon(self._shutdown.on_signal, signal.SIGTERM)

    def run(self) -> int:
        """Load, then step on this thread until the process is to leave; the exit status."""
        try:
            parts = self._load_engine()
            # What is alive now stays; the collector need not look at it again.
            gc.collect()
            gc.freeze()
            watchdog = self._make_watchdog(parts)
            metrics = self._make_metrics(parts)
            loop = EngineLoop(parts.core, self._make_handoff(), metrics.observe_step)
            self._io.run(self._open(parts, metrics, loop)).result()
            watchdog.start()
            self._step(loop)
            watchdog.stop()
            parts.executor.shutdown()
            return 0
        finally:
            self._io.stop(FAREWELL_SECONDS)
            self._tracer.shutdown()

    def _load_engine(self) -> EngineParts:
        try:
            return self._load(self._options.config, _log.info, self._tracer.trace_steps)
        except (ValueError, OSError, ExecutorFailed) as error:
            raise StartError(str(error)) from error

    def _make_metrics(self, parts: EngineParts) -> EngineMetrics:
        cache_config = CacheConfig(
            block_size=parts.config.block_size,
            num_gpu_blocks=parts.executor.num_gpu_blocks,
            enable_prefix_caching=parts.config.enable_prefix_caching,
        )
        return EngineMetrics(self._registry, model_name=served_name(parts.config), cache_config=cache_config)

    def _make_watchdog(self, parts: EngineParts) -> Watchdog:
        num_ranks = parts.config.tensor_parallel_size
        limits = StepLimits.from_warm_up(
            parts.executor.longest_warm_up_step,
            step_timeout=self._options.step_timeout,
            hope=HOPE_SECONDS_PARALLEL if num_ranks > 1 else HOPE_SECONDS,
        )
        return Watchdog(
            limits,
            step_started_at=lambda: parts.core.step_started_at,
            failure=lambda: self._shutdown.failure or parts.executor.failure,
            on_verdict=lambda verdict, age: self._shutdown.on_verdict(verdict, age, num_ranks),
            on_failure=self._shutdown.die,
        )

    def _make_handoff(self) -> Handoff:
        def on_error(error: Exception) -> None:
            _log.error("a step's outputs could not be delivered", exc_info=error)
            self._shutdown.failure = f"a step's outputs could not be delivered: {error}"

        return Handoff(self._io.call_soon, self._frontend.deliver, on_error)

    async def _open(self, parts: EngineParts, metrics: EngineMetrics, loop: EngineLoop) -> None:
        """On the I/O thread: requests are taken from now on."""

        def validate(request: EngineCoreRequest) -> None:
            check_request(request, parts.limits)

        files = read_tokenizer_files(parts.tokenizer_folder)
        info = make_model_info(parts, tokenizer_digest=digest(files) if files else "")
        observer = RequestObserver(self._tracer, metrics)
        self._frontend.open(LoadedEngine(parts.core, info, sorted(files.items()), validate, observer))
        self._shutdown.on_loaded(loop.stop, parts.executor.fail)
        await self._health.update(loaded=True)
        event_loop = asyncio.get_running_loop()
        event_loop.call_later(SETTLE_SECONDS, self._on_session)
        _log.info("ready after %.1f s: %s", time.monotonic() - self._started_at, info.model_name)

    def _step(self, loop: EngineLoop) -> None:
        try:
            loop.run()
        except ExecutorFailed as error:
            self._give_up(str(error))
        except Exception as error:
            _log.error("a step failed", exc_info=error)
            self._give_up(f"a step failed: {error!r}")

    def _give_up(self, reason: str) -> None:
        """The watchdog thread ends the process; there is nothing more for this one to do."""
        self._shutdown.failure = reason
        self._shutdown.gone.wait()

    def _on_session(self) -> None:
        """On the I/O thread: a gateway is here, or has had the time to come."""
        if not self._health.facts.settled:
            self._settling = asyncio.ensure_future(self._health.update(settled=True))


def _credentials(files: TlsFiles | None) -> grpc.ServerCredentials | None:
    try:
        return None if files is None else server_credentials(TlsSource(files))
    except ValueError as error:
        raise StartError(str(error)) from None
