"""EngineServer: the serving process.

The gRPC server starts first and reports NOT_SERVING. The main thread then loads and warms up the model, and steps the
engine until shutdown (see shutdown.py).
"""

import asyncio
import logging
import os
import signal
import time
from collections.abc import Callable
from functools import partial
from importlib.metadata import version

from prometheus_client import CollectorRegistry, make_wsgi_app

from proa.contract.session import MAX_MESSAGE_BYTES, MAX_TEXT_MESSAGE_BYTES
from proa.logs import with_fields
from proa.plugins import Group, log_installed
from proa.tls import TlsSource
from proa.tokenizer_files import digest
from proa.wsgi_server import serve_wsgi
from proa_engine.config import EngineConfig
from proa_engine.core.admission.validation import check_request
from proa_engine.core.executor import Executor, ExecutorFailed
from proa_engine.engine_parts import EngineParts, load_engine
from proa_engine.models.generation_config import read_prompt_files
from proa_engine.observability.metrics import EngineMetrics
from proa_engine.observability.stats_log import log_stats
from proa_engine.observability.telemetry import make_engine_tracer
from proa_engine.server.engine_loop import EngineLoop, OutputQueue
from proa_engine.server.health import GATEWAY_WAIT_SECONDS, Health
from proa_engine.server.io_thread import IoThread, server_credentials
from proa_engine.server.loaded_engine import LoadedEngine, RequestObserver, make_model_info
from proa_engine.server.options import ServeOptions
from proa_engine.server.request_router import RequestRouter
from proa_engine.server.servicer import EngineServicer
from proa_engine.server.shutdown import FLUSH_SECONDS, ShutdownHandler, SignalPipe
from proa_engine.server.watchdog import Watchdog

Load = Callable[[EngineConfig, Callable[[str], None], Callable[[Executor], Executor]], EngineParts]

_log = logging.getLogger(__name__)


class StartError(Exception):
    """The engine cannot start. The message is a sentence for the user."""


def serve(options: ServeOptions) -> int:
    """Serve until shutdown and return the exit status. Raises StartError."""
    server = EngineServer(options)
    server.start()
    server.watch_signals()
    return server.run()


class EngineServer:
    """Owns the I/O thread, the watchdog and the shutdown of one engine. Raises StartError.

    `load` and `exit_process` are parameters for tests.
    """

    def __init__(
        self,
        options: ServeOptions,
        *,
        load: Load = load_engine,
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        try:
            credentials = None if options.tls is None else server_credentials(TlsSource(options.tls))
        except ValueError as error:
            raise StartError(str(error)) from None
        self._options = options
        self._load = load
        self._started_at = time.monotonic()
        self._registry = CollectorRegistry()
        self._tracer = make_engine_tracer(options.config.model_name)
        self._router = RequestRouter(self._on_sleep)
        self._health = Health()
        servicer = EngineServicer(self._router, self._on_session)
        has_large_messages = options.config.enable_prompt_embeds or not options.config.images.language_model_only
        self._io = IoThread(
            f"{options.host}:{options.port}",
            servicer,
            self._health,
            max_message_bytes=MAX_MESSAGE_BYTES if has_large_messages else MAX_TEXT_MESSAGE_BYTES,
            credentials=credentials,
            health_address=f"{options.host}:{options.health_port}" if options.health_port else None,
        )
        self._shutdown = ShutdownHandler(
            self._router,
            self._health,
            run_on_io_thread=self._io.run,
            flush_traces=self._tracer.shutdown,
            drain_timeout=options.drain_timeout,
            exit_process=exit_process,
        )

    def start(self) -> int:
        """Start the gRPC and metrics servers; return the gRPC port. Raises StartError if a port cannot be bound."""
        host, metrics_port = self._options.host, self._options.metrics_port
        try:
            port = self._io.start()
        except OSError as error:
            raise StartError(str(error)) from error
        try:
            if metrics_port:
                serve_wsgi(make_wsgi_app(self._registry), host, metrics_port, name="proa-metrics")
        except OSError as error:
            reason = error.strerror or error
            raise StartError(f"cannot serve metrics on {host}:{metrics_port} (--metrics-port): {reason}") from error
        metrics = f", metrics on {host}:{metrics_port}" if metrics_port else ""
        name = self._options.config.model_name
        text, own_version = "proa-engine %s, loading %s, listening on %s:%d%s", version("proa-engine")
        fields = with_fields(version=own_version, model=name, host=host, port=port, metrics_port=metrics_port or None)
        _log.info(text, own_version, name, host, port, metrics, extra=fields)
        log_installed(_log, (Group.MODELS, Group.QUANTIZATION))
        return port

    def watch_signals(self) -> None:
        """Shut down on SIGTERM and SIGINT. Called on the main thread."""
        pipe = SignalPipe((signal.SIGTERM, signal.SIGINT), self._shutdown.on_signal)
        self._io.add_reader(pipe.fileno(), pipe.read)

    def request_stop(self) -> None:
        """Do what SIGTERM does. Callable from any thread."""
        self._io.call_soon(self._shutdown.on_signal, signal.SIGTERM)

    def run(self) -> int:
        """Load the model, then step on this thread until shutdown; return the exit status."""
        try:
            parts = self._load_engine()
            watchdog = self._make_watchdog(parts)
            metrics = EngineMetrics(
                self._registry,
                parts.config,
                cache_groups=parts.executor.started.cache_groups,
                max_model_len=parts.limits.lengths.max_model_len,
                stats=parts.core.stats,
                counters=parts.core.counters,
                grammars=None if parts.grammars is None else parts.grammars.stats,
            )
            loop = EngineLoop(parts.core, self._make_output_queue(), metrics.observe_step)
            self._io.run(self._admit_requests(parts, metrics, loop)).result()
            watchdog.start()
            self._step(loop)
            watchdog.stop()
            parts.shutdown()
            return 0
        finally:
            self._io.stop(FLUSH_SECONDS)
            self._tracer.shutdown()

    def _load_engine(self) -> EngineParts:
        try:
            return self._load(self._options.engine_config, _log.info, self._tracer.trace_steps)
        except (ValueError, OSError, ExecutorFailed) as error:
            raise StartError(str(error)) from error

    def _make_watchdog(self, parts: EngineParts) -> Watchdog:
        costs, core = parts.executor.started.step_costs, parts.core
        return Watchdog(
            self._options.step_timeout,
            step_started_at=lambda: core.step_started_at,
            expected_seconds=lambda: costs.seconds(core.rows_in_flight),
            failure=lambda: self._shutdown.failure or parts.executor.failure,
            on_step_status=self._shutdown.on_step_status,
            on_failure=self._shutdown.fail,
        )

    def _make_output_queue(self) -> OutputQueue:
        def on_error(error: Exception) -> None:
            _log.error("a step's outputs could not be delivered", exc_info=error)
            self._shutdown.failure = f"a step's outputs could not be delivered: {error}"

        return OutputQueue(self._io.call_soon, self._router.deliver, on_error)

    async def _admit_requests(self, parts: EngineParts, metrics: EngineMetrics, loop: EngineLoop) -> None:
        """I/O thread: the model is loaded."""
        files = read_prompt_files(parts.config, parts.tokenizer_folder)
        info = make_model_info(parts, tokenizer_digest=digest(files) if files else "")
        observer = RequestObserver(self._tracer, metrics)
        validate = partial(check_request, limits=parts.limits)
        loras = parts.core.loaded_loras
        engine = LoadedEngine(parts.core, info, parts.config, sorted(files.items()), validate, observer, loras)
        self._router.start(engine)
        self._shutdown.on_loaded(loop.stop, parts.executor.fail, num_ranks=parts.config.parallel.num_ranks)
        await self._health.update(loaded=True)
        asyncio.get_running_loop().call_later(GATEWAY_WAIT_SECONDS, self._on_session)
        if not self._options.disable_log_stats:
            on_gpu = parts.executor.started.on_gpu
            self._stats_log = asyncio.ensure_future(log_stats(metrics.totals, on_gpu=on_gpu))
        seconds = time.monotonic() - self._started_at
        fields = with_fields(
            model=info.model_name,
            duration_ms=round(1000 * seconds, 1),
            max_model_len=parts.limits.lengths.max_model_len,
            num_ranks=parts.config.parallel.num_ranks,
        )
        _log.info("ready after %.1f s: %s", seconds, info.model_name, extra=fields)

    def _step(self, loop: EngineLoop) -> None:
        try:
            loop.run()
        except ExecutorFailed as error:
            self._wait_for_exit(str(error))
        except Exception as error:
            _log.error("a step failed", exc_info=error)
            self._wait_for_exit(f"a step failed: {error!r}")

    def _wait_for_exit(self, reason: str) -> None:
        """Report a failure and wait until the watchdog thread ends the process."""
        self._shutdown.failure = reason
        self._shutdown.exited.wait()

    def _on_session(self) -> None:
        """I/O thread: a gateway has opened a session, or the time to wait for one is over."""
        if not self._health.state.gateway_wait_over:
            self._health_update = asyncio.ensure_future(self._health.update(gateway_wait_over=True))

    def _on_sleep(self, asleep: bool) -> None:
        """I/O thread: the engine begins to sleep, or is awake again."""
        self._health_update = asyncio.ensure_future(self._health.update(asleep=asleep))
