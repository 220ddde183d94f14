"""Prometheus time series names of the programs' metrics."""

from collections.abc import Iterable
from dataclasses import replace

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from proa.blocks import hash_block
from proa_engine.config import EngineConfig
from proa_engine.core.counters import CoreCounters
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.core.kv.kv_cache_manager import KVCacheManager
from proa_engine.core.types import DiskCounts, DiskOccupancy, FetchCounts
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.observability.metrics import EngineMetrics
from proa_gateway.observability.metrics import GatewayMetrics

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def gateway_metrics() -> set[str]:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    return _names(registry.collect())


def engine_metrics() -> set[str]:
    groups = CacheGroups(num_blocks=1, block_size=16)
    manager = KVCacheManager(groups, hash_block=hash_block, host=HostTierConfig(num_pages=1))
    config = EngineConfig(model="m", speculative_config=SpeculativeConfig(method="eagle3", model="d"))
    disk = DiskOccupancy(0, DiskCounts(), FetchCounts())
    occupancy = replace(manager.occupancy, fetches=FetchCounts(), disk=disk)
    metrics = EngineMetrics(
        CollectorRegistry(), config, cache_groups=groups, max_model_len=16, counters=lambda: CoreCounters(occupancy)
    )
    return _names(metrics.collect())


def _names(families: Iterable[Metric]) -> set[str]:
    return {family.name + suffix for family in families for suffix in _SUFFIXES.get(family.type, ("",))}
