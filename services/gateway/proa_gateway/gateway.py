"""Gateway: the parts of one gateway process, put together and taken apart again."""

import asyncio
import logging
import secrets
import socket
import time
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, ProcessCollector

from proa.tls import TlsSource
from proa_gateway.admission.auth import ApiKeyStore
from proa_gateway.admission.request_queue import RequestQueue
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.channels import TlsChannels, insecure_channels
from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.discovery import Discovery, EndpointSliceDiscovery, StaticDiscovery
from proa_gateway.engines.model_registry import ModelRegistry
from proa_gateway.engines.pool import EnginePool
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.openai.serving import Serving
from proa_gateway.routing.router import Router

TOKENIZER_THREADS = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Gateway:
    """What routes use."""

    config: GatewayConfig
    pool: EnginePool
    models: ModelRegistry
    metrics: GatewayMetrics
    serving: Serving
    api_keys: ApiKeyStore
    router: Router
    started: int = field(default_factory=lambda: int(time.time()))  # Unix seconds


@asynccontextmanager
async def open_gateway(config: GatewayConfig) -> AsyncIterator[Gateway]:
    """A running gateway, looking for its engines. At the end every session is closed and every task gone."""
    api_keys = ApiKeyStore(config.api_keys)
    tracer = GatewayTracer.from_environment()
    registry = _registry()
    router = Router(config.routing)
    metrics = GatewayMetrics(registry)
    discovery = make_discovery(config)
    channels = TlsChannels(TlsSource(config.tls), config.tls_server_name) if config.tls else insecure_channels
    with ThreadPoolExecutor(TOKENIZER_THREADS, thread_name_prefix="tokenizer") as executor:
        models = ModelRegistry(executor, folder=config.tokenizer)
        pool = EnginePool(
            client_id=f"{socket.gethostname()}-{secrets.token_hex(4)}",
            models=models,
            deadlines=config.deadlines,
            router=router,
            open_channel=channels,
            observe=lambda client: _observe(client, models, serving.admission.queue),
        )
        metrics.watch(pool.engines, router.index)
        serving = Serving(
            config,
            router=router,
            pool=pool,
            models=models,
            tracer=tracer,
            metrics=metrics,
        )
        following = [
            asyncio.create_task(_follow(discovery, pool), name="discovery"),
            asyncio.create_task(api_keys.watch(), name="API keys"),
        ]
        try:
            yield Gateway(config, pool, models, metrics, serving, api_keys, router)
        finally:
            for task in following:
                task.cancel()
            await asyncio.gather(*following, return_exceptions=True)
            await discovery.close()
            await pool.close()
            await asyncio.get_running_loop().run_in_executor(executor, tracer.shutdown)


def make_discovery(config: GatewayConfig) -> Discovery:
    if config.engine_service is None:
        return StaticDiscovery(config.engines)
    host, port = config.engine_service.rsplit(":", 1)
    service, namespace = host.split(".", 1)
    return EndpointSliceDiscovery(service, namespace, int(port))


async def _follow(discovery: Discovery, pool: EnginePool) -> None:
    try:
        async for endpoints in discovery.endpoints():
            staying = sorted((one for one in endpoints if not one.terminating), key=lambda one: one.uid)
            pool.set_engines({one.address: one.uid for one in staying})
    except Exception:
        _log.exception("engines that come or go are no longer noticed")
        raise


def _observe(client: EngineClient, models: ModelRegistry, queue: RequestQueue) -> None:
    """Called when an engine's state or load changes, and after its session has ended."""
    queue.capacity_changed()
    if client.model_name is None:
        models.forget(client.address)
    else:
        queue.add_model(client.model_name)


def _registry() -> CollectorRegistry:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry
