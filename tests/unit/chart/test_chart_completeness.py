"""Every value has a description, a schema and a test; the programs have the flags and metrics that the chart uses."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema  # a dependency of kubernetes-validate
import pytest
import yaml

from proa_engine.cli import make_parser as engine_parser
from proa_gateway.cli import make_parser as gateway_parser
from support.chart import CHART, COMBINATIONS, GATEWAY, ROOT, lookup, needs_helm, render
from support.metric_names import engine_metrics, gateway_metrics

DESCRIBED = set(re.findall(r"^\| `([^`]+)` \|", (CHART / "README.md").read_text(), re.M))


VALIDATOR = jsonschema.Draft7Validator(json.loads((CHART / "values.schema.json").read_text()))
DEFAULTS = yaml.safe_load((CHART / "values.yaml").read_text())


def leaves(values: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Paths of the values that have a description, or that no described value contains."""
    for key, value in values.items():
        path = f"{prefix}{key}"
        if isinstance(value, dict) and value and path not in DESCRIBED:
            yield from leaves(value, f"{path}.")
        else:
            yield path


VALUES = list(leaves(DEFAULTS))


def nested(path: str, value: Any) -> Any:
    """Values with one value at a dotted path."""
    for key in reversed(path.split(".")):
        value = {key: value}
    return value


def test_every_value_is_described_and_tested() -> None:
    tests = "".join(file.read_text() for file in Path(__file__).parent.glob("test_chart_*_values.py"))
    assert len(VALUES) > 90
    assert [path for path in VALUES if path not in DESCRIBED] == []
    assert [path for path in VALUES if f'"{path}": Case(' not in tests] == []


def test_the_schema_accepts_the_defaults() -> None:
    VALIDATOR.validate(DEFAULTS)


def test_the_schema_rejects_a_wrong_type_at_every_path() -> None:
    assert [path for path in VALUES if VALIDATOR.is_valid(nested(path, [["text"]]))] == []


def test_the_schema_rejects_a_misspelled_key_at_every_path() -> None:
    assert [path for path in VALUES if VALIDATOR.is_valid(nested(f"{path}Typo", {}))] == []


@needs_helm
def test_the_chart_renders_without_all_values_that_are_not_required() -> None:
    required = set((CHART / "templates" / "_required.tpl").read_text().split())

    def without(values: dict[str, Any], prefix: str = "") -> dict[str, Any]:
        found = {key: f"{prefix}{key}" for key in values if f"{prefix}{key}" not in required}
        objects = {key: value for key, value in values.items() if isinstance(value, dict) and key not in found}
        return dict.fromkeys(found) | {key: without(value, f"{prefix}{key}.") for key, value in objects.items()}

    switches = {"prometheusRule", "monitoring", "dashboards"}
    objects = render(without(DEFAULTS) | {f"{each}.enabled": True for each in switches})
    assert {"PrometheusRule", "PodMonitor", "ConfigMap"} <= {kind for kind, _ in objects}


def test_readme_and_schema_are_generated_from_the_values() -> None:
    subprocess.run([sys.executable, ROOT / "scripts" / "chart-docs", "--check"], check=True)


@needs_helm
@pytest.mark.parametrize("combination", COMBINATIONS)
def test_the_programs_accept_every_argument(combination: str, tmp_path: Path) -> None:
    objects = render(COMBINATIONS[combination])
    for (kind, name), found in objects.items():
        if kind == "Deployment" and name != "proa-gateway":
            pod = found["spec"]["template"]["spec"]
            for container in pod["containers"] + pod.get("initContainers", []):
                engine_parser().parse_args(container["args"])
    keys = tmp_path / "keys.json"  # read while arguments are parsed
    keys.write_text('{"keys": [{"name": "a", "key": "b"}]}')
    arguments = lookup(objects, *GATEWAY, "args")
    gateway_parser().parse_args([each.replace("/etc/proa/keys/keys.json", str(keys)) for each in arguments])


def exported() -> set[str]:
    """Prometheus time series names of the gateway's and the engine's metrics."""
    return gateway_metrics() | engine_metrics()


def test_prometheus_adapter_serves_the_autoscaling_metrics() -> None:
    rules = yaml.safe_load((ROOT / "k8s" / "prometheus-adapter.yaml").read_text())["rules"]["custom"]
    scaling = yaml.safe_load((CHART / "values.yaml").read_text())["enginePool"]["autoscaling"]
    assert {rule["name"]["as"] for rule in rules} == {
        *("vllm_num_requests_waiting", "vllm_kv_cache_usage_perc"),  # the defaults of `metric`, by role
        scaling["queueMetric"],
    }
    assert {rule["seriesQuery"].partition("{")[0] for rule in rules} <= exported()


@needs_helm
def test_each_alert_has_a_section_in_the_documentation() -> None:
    rules = lookup(render({"prometheusRule.enabled": True}), "PrometheusRule", "proa", "spec", "groups", 0, "rules")
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "alerts.md").read_text(), re.MULTILINE)
    assert sections == [rule["alert"] for rule in rules]
