"""The tables of docs/metrics.md. `make pages` writes them into the page."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from proa_engine.config import EngineConfig
from proa_engine.core.counters import CoreCounters
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.types import CacheOccupancy, DiskCounts, DiskOccupancy, FetchCounts, HostOccupancy
from proa_engine.grammar.stats import GrammarStats
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.observability.metrics import EngineMetrics
from proa_gateway.observability.metrics import GatewayMetrics
from support.documentation import ROOT

PAGE = ROOT / "docs/metrics.md"
_START = "<!-- From here on written by `make pages` -->\n"
_OF_ALL = ("engine", "model_name")  # labels of an engine's metrics, which the page's text names


def page() -> str:
    """The page as it should be: its text as it is, and the tables."""
    head, mark, _ = PAGE.read_text().partition(_START)
    assert mark, f"{PAGE} has no line {_START}"
    parts = [head + mark]
    for title, registry, common in (("Gateway", _gateway(), ()), ("Engine", _engine(), _OF_ALL)):
        parts.append(f"\n## {title}\n\n| metric | type | labels | |\n|---|---|---|---|\n")
        parts += _rows(registry, common)
    return "".join(parts)


def _rows(registry: CollectorRegistry, common: Sequence[str]) -> Iterable[str]:
    for family in registry.collect():
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = ", ".join(f"`{label}`" for label in _labels(registry, family) if label not in common)
        yield f"| `{name}` | {family.type} | {labels} | {family.documentation} |\n"


def _labels(registry: CollectorRegistry, family: Metric) -> Sequence[str]:
    """A collector's own metric has its labels only there, before it has samples."""
    collector = registry._names_to_collectors.get(family.name)
    return cast(Sequence[str], getattr(cast(Any, family), "_labelnames", getattr(collector, "_labelnames", ())))


class _Nothing:
    """No engines behind a gateway."""

    num_blocks = num_bytes = num_gateways = 0


def _gateway() -> CollectorRegistry:
    metrics = GatewayMetrics(registry := CollectorRegistry())
    metrics.pool.watch((), _Nothing(), _Nothing())
    return registry


def _engine() -> CollectorRegistry:
    """With all features that add metrics."""
    host = HostOccupancy(1, 0, 0, 0, 0, 0, 0)
    occupancy = CacheOccupancy(host=host, fetches=FetchCounts(), disk=DiskOccupancy(0, DiskCounts(), FetchCounts()))
    EngineMetrics(
        registry := CollectorRegistry(),
        EngineConfig(model="m", speculative_config=SpeculativeConfig(method="eagle3", model="d")),
        cache_groups=CacheGroups(num_blocks=1, block_size=16),
        max_model_len=16,
        counters=lambda: CoreCounters(occupancy),
        grammars=GrammarStats(),
    )
    return registry


if __name__ == "__main__":
    PAGE.write_text(page())
