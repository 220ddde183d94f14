"""The example values: valid objects, arguments that the programs accept, a row in the chart's README."""

import re
from pathlib import Path
from typing import Any

import jsonschema  # a dependency of kubernetes-validate
import kubernetes_validate
import pytest
import yaml

from proa_engine.cli import make_parser as engine_parser
from proa_gateway.cli import make_parser as gateway_parser
from support.chart import CHART, GATEWAY, lookup, needs_helm, render
from support.custom_resources import SCHEMAS

VERSION = "1.35"
EXAMPLES = sorted((CHART / "examples").glob("*.yaml"))


@needs_helm
@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_renders_valid_objects_with_arguments_that_exist(example: Path) -> None:
    values: dict[str, Any] = yaml.safe_load(example.read_text())
    objects = render(values, f"--kube-version={VERSION}.0")
    for (kind, name), each in objects.items():
        if kind in SCHEMAS:
            jsonschema.validate(each, SCHEMAS[kind], jsonschema.Draft202012Validator)
        else:
            kubernetes_validate.validate(each, VERSION, strict=True)
        if kind == "Deployment" and name != "proa-gateway":
            pod = each["spec"]["template"]["spec"]
            for container in (*pod["containers"], *pod.get("initContainers", [])):
                engine_parser().parse_args(container["args"])
    arguments = [each for each in lookup(objects, *GATEWAY, "args") if not each.startswith("--api-keys=")]
    gateway_parser().parse_args(arguments)


def test_the_readme_lists_the_examples() -> None:
    listed = re.findall(r"^\| \[([\w.-]+)\]\(examples/\1\)", (CHART / "README.md").read_text(), re.MULTILINE)
    assert sorted(listed) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_begins_with_the_command_that_installs_it(example: Path) -> None:
    command = f"#   helm install proa charts/proa --values charts/proa/examples/{example.name}"
    assert command in example.read_text().partition("\ngateway:")[0]
