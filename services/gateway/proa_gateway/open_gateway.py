"""The composition root: builds the parts of one gateway process, starts them and shuts them down."""

import asyncio
import logging
import secrets
import socket
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from functools import partial

from prometheus_client import CollectorRegistry, ProcessCollector

from proa.tls import TlsSource
from proa_gateway.admission.auth import ApiKeyStore
from proa_gateway.admission.control import AdmissionControl
from proa_gateway.audio.loader import AudioLoader
from proa_gateway.audio.memory import AudioMemory
from proa_gateway.audio.parts import FILE_NAME, AudioPartLoader
from proa_gateway.config import GatewayConfig
from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.deletion_costs import write_deletion_costs
from proa_gateway.engines.discovery import (
    Discovery,
    EndpointSliceDiscovery,
    StaticDiscovery,
    TlsChannels,
    insecure_channels,
)
from proa_gateway.engines.kv_exchange import KvExchange
from proa_gateway.engines.models import LoraRegistry, ModelRegistry
from proa_gateway.engines.pool import EnginePool
from proa_gateway.gateway import Gateway
from proa_gateway.http.bodies import LargeBodies
from proa_gateway.http.middleware import AllowedHosts
from proa_gateway.images.config import ImageOptions
from proa_gateway.images.fetch import MediaFetcher
from proa_gateway.images.loader import ImageLoader
from proa_gateway.keep_running import keep_running
from proa_gateway.observability.kv_metrics import KvMetrics
from proa_gateway.observability.metrics import GatewayMetrics
from proa_gateway.observability.telemetry import GatewayTracer
from proa_gateway.parsing.known_formats import known_formats
from proa_gateway.routing.router import Router
from proa_gateway.scaler.demand import Demand
from proa_gateway.scaler.server import serve_scaler
from proa_gateway.serving.constraints import Constrainer
from proa_gateway.serving.grammars import Grammars
from proa_gateway.serving.ignored_fields import Notices
from proa_gateway.serving.job import ApiSettings
from proa_gateway.serving.message_format import MessageFormats
from proa_gateway.serving.serving import Serving
from proa_gateway.serving.stored_responses import BackgroundTasks, ResponseStore

TOKENIZER_THREADS = 2
MAX_STORED_RESPONSE = 8 * 2**20  # bytes, with its input; a request that continues it reads them in 25 ms
GRAMMAR_THREADS = 2  # their stacks: see `server.THREAD_STACK`
_log = logging.getLogger(__name__)


@asynccontextmanager
async def open_gateway(
    config: GatewayConfig, large_bodies: LargeBodies, audio_memory: AudioMemory
) -> AsyncIterator[Gateway]:
    """A running gateway that connects to its engines. On exit it closes all sessions and ends all tasks."""
    async with AsyncExitStack() as at_exit:
        executor = at_exit.enter_context(ThreadPoolExecutor(TOKENIZER_THREADS, "tokenizer"))
        grammar_executor = at_exit.enter_context(ThreadPoolExecutor(GRAMMAR_THREADS, "grammar"))
        image_executor = at_exit.enter_context(ThreadPoolExecutor(config.images.image_threads, "image"))
        tracer, metrics, notices = GatewayTracer.from_environment(), _make_metrics(), Notices()
        at_exit.push_async_callback(asyncio.get_running_loop().run_in_executor, executor, tracer.shutdown)

        fetcher = _make_fetcher(config.images, "image", config.images.max_image_bytes, "images")
        at_exit.push_async_callback(fetcher.close)
        images = ImageLoader(
            config.images, fetcher=fetcher, executor=image_executor, metrics=metrics.media, tracer=tracer
        )

        audios = AudioLoader(config.audio, audio_memory, metrics.media)
        at_exit.push_async_callback(audios.close)
        audio_fetcher = _make_fetcher(config.images, FILE_NAME, config.audio.max_audio_bytes, "audios")
        at_exit.push_async_callback(audio_fetcher.close)
        audio_parts = AudioPartLoader(
            audios,
            audio_fetcher,
            config.images.limit_mm_per_prompt.audio,
            config.images.image_cache_bytes,
            tracer,
        )

        formats = _make_formats(config)
        loras = LoraRegistry(config.lora_modules)
        models = ModelRegistry(
            executor,
            folder=config.tokenizer,
            chat_template=config.chat_template,
            loras=loras,
            prepare=formats.prepare,
        )

        def on_engine_change(engine: EngineClient) -> None:
            """An engine's session has begun or ended, or it drains."""
            if engine.model_name is None:
                models.forget(engine.address)
            else:
                admission.queue.add_model(engine.model_name)

        def on_room() -> None:
            admission.session_queue.changed()

        router = Router(config.routing, on_room=on_room if config.session_admission != "off" else None)
        channels = TlsChannels(TlsSource(config.tls), config.tls_server_name) if config.tls else insecure_channels
        name = f"{socket.gethostname()}-{secrets.token_hex(4)}"
        pool = EnginePool(
            client_id=name,
            models=models,
            deadlines=config.deadlines,
            router=router,
            open_channel=channels,
            on_change=on_engine_change,
            on_load=lambda: admission.queue.capacity_changed(),
            exchange=_make_exchange(config, router, metrics.kv),
        )
        at_exit.push_async_callback(pool.close)
        demand = Demand(pool.engines)
        metrics.pool.watch(pool.engines, router.index, demand)
        admission = AdmissionControl(config, pool=pool, models=models, metrics=metrics, demand=demand)

        serving = Serving(
            config,
            admission=admission,
            pool=pool,
            loras=loras,
            constrainer=Constrainer(Grammars(grammar_executor, large_bodies), pool),
            tracer=tracer,
            metrics=metrics,
            router=router,
            notices=notices,
        )
        api_keys = ApiKeyStore(
            config.api_keys, config.api_key, config.operator_key, separates_caches=config.separate_prefix_caches
        )
        gateway = Gateway(
            pool=pool,
            models=models,
            router=router,
            metrics=metrics,
            admission=admission,
            serving=serving,
            api_keys=api_keys,
            hosts=AllowedHosts.of_machine(config.host, config.allowed_hosts),
            config=config,
            responses=_make_response_store(config),
            background=BackgroundTasks(),
            audios=audios,
            notices=notices,
            settings=_make_settings(config, formats, images, audio_parts),
        )
        discovery = make_discovery(config)
        at_exit.push_async_callback(discovery.close)
        at_exit.push_async_callback(_end, _start_tasks(config, discovery, pool, api_keys))
        at_exit.push_async_callback(gateway.background.close)
        await at_exit.enter_async_context(serve_scaler(config.scaler, config.host, name, demand))
        yield gateway


def _make_metrics() -> GatewayMetrics:
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return GatewayMetrics(registry)


def _make_formats(config: GatewayConfig) -> MessageFormats:
    """The formats of all models. Those of plugins that fail are logged and left out."""
    formats = known_formats()
    for failure in formats.failures.values():
        _log.warning("%s", failure)
    return MessageFormats(formats, config.tool_call_parser, config.reasoning_parser)


def _make_exchange(config: GatewayConfig, router: Router, metrics: KvMetrics) -> KvExchange:
    return KvExchange(
        router,
        metrics,
        bandwidth=config.kv_transfer_bandwidth * 1e9,
        min_remote_prefill_tokens=config.min_remote_prefill_tokens,
    )


def _make_fetcher(options: ImageOptions, name: str, max_bytes: int, limit: str) -> MediaFetcher:
    return MediaFetcher(
        options.allowed_media_domains, timeout=options.image_fetch_timeout, max_bytes=max_bytes, name=name, limit=limit
    )


def _make_response_store(config: GatewayConfig) -> ResponseStore:
    return ResponseStore(
        max_responses=config.max_stored_responses,
        max_bytes=config.max_stored_response_bytes,
        max_response_bytes=MAX_STORED_RESPONSE,
    )


def _make_settings(
    config: GatewayConfig, formats: MessageFormats, images: ImageLoader, audios: AudioPartLoader
) -> ApiSettings:
    return ApiSettings(
        formats=formats,
        trusts_template=config.trust_request_chat_template,
        content_format=config.chat_template_content_format,
        images=images,
        audios=audios,
        plain_texts=config.plain_special_tokens,
        includes_usage=config.enable_force_include_usage,
        tokens_as_ids=config.return_tokens_as_token_ids,
        max_choices=config.max_choices,
        max_pooling_inputs=config.max_pooling_inputs,
        max_pooling_tokens=config.max_pooling_tokens,
    )


def make_discovery(config: GatewayConfig) -> Discovery:
    if config.engine_service is None:
        return StaticDiscovery(config.engines)
    host, port = config.engine_service.rsplit(":", 1)
    service, namespace = host.split(".", 1)
    return EndpointSliceDiscovery(service, namespace, int(port))


async def _follow(discovery: Discovery, pool: EnginePool) -> None:
    """Connect to the engines that discovery finds, and disconnect from those that are terminating or gone."""
    async with aclosing(discovery.endpoints()) as found:
        async for endpoints in found:
            staying = sorted((each for each in endpoints if not each.terminating), key=lambda each: each.uid)
            pool.set_engines({each.address: each.uid for each in staying})


def _start_tasks(
    config: GatewayConfig, discovery: Discovery, pool: EnginePool, api_keys: ApiKeyStore
) -> list["asyncio.Task[None]"]:
    """Start what runs beside the requests, as long as the gateway."""
    tasks = [
        asyncio.create_task(keep_running("discovery", partial(_follow, discovery, pool)), name="discovery"),
        asyncio.create_task(keep_running("watching the API keys", api_keys.watch), name="API keys"),
    ]
    if config.pod_deletion_cost:
        write = partial(write_deletion_costs, pool.engines, discovery)
        tasks.append(asyncio.create_task(keep_running("writing deletion costs", write), name="deletion costs"))
    return tasks


async def _end(tasks: list["asyncio.Task[None]"]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
