"""The chart's dashboards and alerts query series that the metrics pages of a gateway and an engine really have."""

import asyncio
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import chain

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from proa.metric_buckets import FIRST_TOKEN_BUCKETS
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.kv.host_tier import HostTierConfig
from proa_engine.observability.metrics import EngineMetrics
from proa_gateway import errors
from proa_gateway.observability.metrics import QUEUE_BUCKETS
from proa_gateway.observability.outcome import Outcome
from proa_gateway.serving.serving import _REJECTIONS
from support.chart import CHART, lookup, needs_helm, render
from support.core import CoreRun, make_request
from support.fake_disk import FakeDisk
from support.fake_engine import FakeEngine, say
from support.gateway import running_gateway
from support.promql import Selector, selectors
from support.scrape import Scrape

MODEL_LABELS = ("model_name", "model", "gen_ai_request_model")
"""One of them names the model, by metric."""
BY_PROMETHEUS = {"namespace", "pod", "job", "instance"}  # labels that the operator's scrapes add
LIMITS = ("requests", "waiting", "tokens", "images", "audios")  # see GatewayMetrics.observe_rejection


@dataclass(frozen=True)
class Series:
    """Label names and values of each metric on a page, histograms by the names of their series."""

    labels: Mapping[str, Mapping[str, set[str]]]

    @classmethod
    def of(cls, page: Scrape) -> "Series":
        labels: dict[str, dict[str, set[str]]] = {}
        for name, sample in page.samples:
            found = labels.setdefault(name, {})
            for label, value in sample:
                found.setdefault(label, set()).add(value)
        return cls(labels)


@pytest.fixture(scope="module")
def gateway_series() -> Series:
    return Series.of(Scrape(asyncio.run(gateway_page())))


async def gateway_page() -> str:
    """Of a gateway that has answered a chat request. What needs a cluster or seconds is observed by hand."""
    async with (
        FakeEngine(script=say("one")) as engine,
        running_gateway(engine, session_admission="retain") as gateway,
    ):
        assert (await gateway.chat()).status_code == 200
        assert (await gateway.http.post("/v1/chat/completions", json={})).status_code == 400
        metrics = gateway.gateway.metrics
        metrics.observe_queue_wait("fake", "admitted", 0.5)
        metrics.observe_session_wait("fake", "place", 0.5)
        metrics.observe_rejection("requests")
        keyed = Outcome(
            route="/", operation="chat", status=503, model="fake", base_model="fake", key="team", output_tokens=1
        )
        metrics.observe_outcome(keyed)
        metrics.kv.observe_source("prefill")
        metrics.kv.observe_fetch("prefill", num_tokens=1, num_bytes=1, seconds=0.1)
        metrics.kv.observe_remote_prefill("used")
        metrics.observe_move("drain")
        return (await gateway.http.get("/metrics")).text


@pytest.fixture(scope="module")
def engine_series() -> Series:
    """Of an engine with all tiers of the KV cache, whose core has finished a request."""
    tiers = CoreRun(host=HostTierConfig(num_pages=22), fetches=random.Random(1), disk=FakeDisk())
    metrics = EngineMetrics(
        registry := CollectorRegistry(),
        EngineConfig(model="m", block_size=4),
        cache_groups=CacheGroups(num_blocks=64, block_size=4),
        max_model_len=64,
        stats=tiers.core.stats,
        counters=tiers.core.counters,
    )
    core = CoreRun().core
    core.submit(make_request("a", range(17), max_tokens=4))
    while core.has_unfinished_requests():
        if (outputs := core.step()) is not None:
            metrics.observe_outputs(outputs)
    metrics.observe_rejection("waiting")
    return Series.of(Scrape(generate_latest(registry).decode()))


def dashboard(name: str) -> dict[str, str]:
    """The expressions of a dashboard by the title of their panel and their number there."""
    panels = json.loads((CHART / "dashboards" / f"{name}.json").read_text())["panels"]
    return {
        f"{panel['title']} {number}": target["expr"]
        for panel in panels
        for number, target in enumerate(panel.get("targets", []))  # a row has none
    }


def alerts() -> dict[str, str]:
    """The expressions of all alerts by name."""
    empty = {"model": "org/idle", "keda": {"enabled": True}}
    values = {"prometheusRule.enabled": True, "gateway.scaleFromZero.timeoutSeconds": 60, "engines.idle": empty}
    (group,) = lookup(render({**values, "engines.builtin": {}}), "PrometheusRule", "proa", "spec", "groups")
    return {f"{rule['alert']} {rule['labels'].get('model', '')}": rule["expr"] for rule in group["rules"]}


def labels_of_monitors(kind: str, name: str) -> set[str]:
    """The labels that a monitor of the chart copies from pods or Services to their series."""
    labels = lookup(render({"monitoring.enabled": True}), kind, name, "spec", "podTargetLabels")
    return {re.sub(r"\W", "_", label) for label in labels} | BY_PROMETHEUS


def check(selector: Selector, series: Series, scraped: set[str]) -> None:
    """The metric has samples, with the labels that the selector matches and groups by, and with the values."""
    assert selector.metric in series.labels, selector.metric
    own = series.labels[selector.metric]
    assert selector.matchers.keys() | selector.grouped_by <= own.keys() | scraped, selector
    for label in selector.matchers.keys() & own.keys() - {*MODEL_LABELS, "error_type", "reason"}:
        assert own[label].issuperset(selector.label_values(label)), selector


@needs_helm
def test_the_gateways_dashboard_queries_series_of_gateways(gateway_series: Series) -> None:
    scraped = labels_of_monitors("ServiceMonitor", "proa-gateway")
    for selector in chain.from_iterable(map(selectors, dashboard("gateway").values())):
        check(selector, gateway_series, scraped)


@needs_helm
def test_the_engines_dashboard_queries_series_of_engines(engine_series: Series) -> None:
    scraped = labels_of_monitors("PodMonitor", "proa-engine")
    for selector in chain.from_iterable(map(selectors, dashboard("engines").values())):
        check(selector, engine_series, scraped)


@pytest.mark.parametrize("name", ["gateway", "engines"])
def test_every_query_uses_the_variables_of_its_dashboard(
    name: str, gateway_series: Series, engine_series: Series
) -> None:
    board = json.loads((CHART / "dashboards" / f"{name}.json").read_text())
    variables = {each["name"] for each in board["templating"]["list"]}
    assert variables == {"datasource", "namespace", "release", "model", *(["pool"] if name == "engines" else [])}
    series = gateway_series if name == "gateway" else engine_series
    found = dashboard(name)
    assert len(found) > 20
    for where, expression in found.items():
        for selector in selectors(expression):
            used = {value.removeprefix("$") for _, value in selector.matchers.values() if value.startswith("$")}
            named = series.labels[selector.metric].keys() & set(MODEL_LABELS)
            assert used == variables - {"datasource"} - (set() if named else {"model"}), where


@pytest.mark.parametrize("name", ["gateway", "engines"])
def test_variables_list_the_values_of_labels_that_exist(
    name: str, gateway_series: Series, engine_series: Series
) -> None:
    board = json.loads((CHART / "dashboards" / f"{name}.json").read_text())
    series = gateway_series if name == "gateway" else engine_series
    for variable in board["templating"]["list"][1:]:
        query = re.fullmatch(r"label_values\((.+), (\w+)\)", variable["query"]["query"])
        assert query is not None
        (selector,) = selectors(query[1])
        assert selector.metric in series.labels
        assert query[2] in {"namespace", "app_kubernetes_io_instance", "model_name", "proa_pool"}


def test_all_pools_of_the_engines_dashboard_are_no_gateways() -> None:
    board = json.loads((CHART / "dashboards" / "engines.json").read_text())
    (pool,) = (each for each in board["templating"]["list"] if each["name"] == "pool")
    assert re.fullmatch(pool["allValue"], "builtin")
    assert not re.fullmatch(pool["allValue"], "")  # gateways have the engines' metrics too, and no label proa_pool


@needs_helm
def test_alerts_query_series_that_exist(gateway_series: Series, engine_series: Series) -> None:
    found = alerts()
    assert len(found) > 12
    scraped = labels_of_monitors("PodMonitor", "proa-engine")
    for name, expression in found.items():
        every = list(selectors(expression))
        assert every, name
        for selector in every:
            assert {"namespace", "app_kubernetes_io_instance"} <= selector.matchers.keys(), name
            if selector.metric != "up":  # which Prometheus writes itself
                is_gateways = selector.metric in gateway_series.labels and selector.matchers.keys().isdisjoint(
                    {"engine"}
                )
                check(selector, gateway_series if is_gateways else engine_series, scraped)


@needs_helm
def test_alerts_name_errors_and_reasons_that_gateways_report() -> None:
    codes = {each.code for each in vars(errors).values() if isinstance(each, type) and hasattr(each, "code")}
    for selector in chain.from_iterable(map(selectors, alerts().values())):
        if "error_type" in selector.matchers:
            assert codes.issuperset(selector.label_values("error_type"))
        if "reason" in selector.matchers:
            assert {*_REJECTIONS.values(), *LIMITS}.issuperset(selector.label_values("reason"))


def test_thresholds_of_times_are_less_than_the_last_bucket() -> None:
    """A quantile in Prometheus is never more, so that the alert would be silent."""
    schema = json.loads((CHART / "values.schema.json").read_text())["properties"]["prometheusRule"]
    thresholds = schema["properties"]["thresholds"]["properties"]
    assert thresholds["queueWaitSeconds"]["exclusiveMaximum"] == QUEUE_BUCKETS[-1]
    assert thresholds["sessionWaitSeconds"]["exclusiveMaximum"] == QUEUE_BUCKETS[-1]
    assert thresholds["timeToFirstTokenSeconds"]["exclusiveMaximum"] == FIRST_TOKEN_BUCKETS[-1]


def test_an_expression_that_cannot_be_parsed_is_refused() -> None:
    with pytest.raises(ValueError, match="unclosed"):
        list(selectors("sum by (x (up)"))
