"""A real API server admits every object that the chart renders; its admission checks more than schemas do."""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.chart import CHART, COMBINATIONS, render
from support.custom_resources import SCHEMAS
from support.kube import run

EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_object_is_admitted(combination: str) -> None:
    dry_run(COMBINATIONS[combination])


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_every_object_of_an_example_is_admitted(example: Path) -> None:
    dry_run(yaml.safe_load(example.read_text()))


def dry_run(values: dict[str, Any]) -> None:
    """Without the kinds that need a CRD."""
    server = json.loads(run("kubectl", "version", "--output=json"))["serverVersion"]["gitVersion"]
    objects = [each for (kind, _), each in render(values, f"--kube-version={server}").items() if kind not in SCHEMAS]
    manifest = {"apiVersion": "v1", "kind": "List", "items": objects}
    run("kubectl", "apply", "--dry-run=server", "--filename=-", stdin=json.dumps(manifest))
