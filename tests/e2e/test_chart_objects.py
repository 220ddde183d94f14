"""A real API server admits every object that the chart renders; its admission checks more than schemas do."""

import json

import pytest

from support.chart import COMBINATIONS, template
from support.kube import run


@pytest.mark.parametrize("combination", COMBINATIONS)
def test_every_object_is_admitted(combination: str) -> None:
    server = json.loads(run("kubectl", "version", "--output=json"))["serverVersion"]["gitVersion"]
    rendered = template(COMBINATIONS[combination], f"--kube-version={server}")
    assert rendered.returncode == 0, rendered.stderr
    run("kubectl", "apply", "--dry-run=server", "--filename=-", stdin=rendered.stdout)
