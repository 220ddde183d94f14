"""What the chart tells its user to type, and how `helm test` asks."""

import subprocess

import pytest

from support.chart import CHART, HELM, lookup, needs_helm, render

pytestmark = needs_helm


def notes(*settings: str) -> str:
    flags = [f"--set={setting}" for setting in settings]
    command = [str(HELM), "install", "sea", str(CHART), "--namespace=here", "--dry-run=client", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.partition("NOTES:")[2]


def test_the_notes_say_how_to_reach_the_gateway_and_ask_each_model() -> None:
    text = notes("engines.big.model=org/big", "gateway.service.port=81")
    assert "kubectl --namespace here port-forward service/sea-proa-gateway 8000:81" in text
    assert '{"model": "proa-builtin"' in text
    assert '{"model": "org/big"' in text
    assert "helm test sea --namespace here" in text
    assert "Authorization" not in text


def test_the_notes_ask_for_a_key_where_one_is_needed() -> None:
    assert '--header "Authorization: Bearer $KEY" \\\n' in notes("gateway.apiKeys.existingSecret=keys")


@pytest.mark.parametrize(("secret", "variables"), [("", None), ("keys", {"name": "keys", "key": "keys.json"})])
def test_helm_test_asks_with_a_key_of_the_secret(secret: str, variables: dict[str, str] | None) -> None:
    objects = render({"gateway.apiKeys.existingSecret": secret})
    container = lookup(objects, "Pod", "proa-test-builtin", "spec", "containers", 0)
    references = [variable["valueFrom"]["secretKeyRef"] for variable in container.get("env", [])]
    assert references == ([variables] if variables else [])


def test_helm_test_asks_every_pools_model() -> None:
    objects = render({"engines": {"big": {"model": "org/big"}}})
    asked = {document["spec"]["containers"][0]["args"][-1] for (kind, _), document in objects.items() if kind == "Pod"}
    assert asked == {"proa-builtin", "org/big"}
