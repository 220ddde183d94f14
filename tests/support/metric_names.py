"""Prometheus time series names of the programs' metrics."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from proa_engine.config import EngineConfig
from proa_engine.metrics import EngineMetrics
from proa_gateway.observability.metrics import GatewayMetrics

_SUFFIXES = {"counter": ("_total",), "histogram": ("_bucket", "_sum", "_count")}


def gateway_metrics() -> set[str]:
    registry = CollectorRegistry()
    GatewayMetrics(registry)
    return _names(registry.collect())


def engine_metrics() -> set[str]:
    return _names(EngineMetrics(CollectorRegistry(), EngineConfig(model="m"), num_gpu_blocks=1).collect())


def _names(families: Iterable[Metric]) -> set[str]:
    return {family.name + suffix for family in families for suffix in _SUFFIXES.get(family.type, ("",))}
