"""Example values of the chart on a cluster; in this order. Not a smoke test."""

import json

import pytest
from openai import AuthenticationError

from support.chat import ask
from support.kube import CHART, Release, run

EXAMPLES = CHART / "examples"
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], int(sys.argv[2])), 3).close(); print('connected')"


def test_ingress_yaml_as_it_is(release: Release) -> None:
    """The cluster needs no Ingress controller: requests go to the Service that the Ingress names."""
    keys = json.dumps({"keys": [{"name": "team", "key": "first"}]})
    release.apply(
        {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "proa-keys"}, "stringData": {"keys.json": keys}}
    )
    release.install(EXAMPLES / "ingress.yaml")
    assert len(release.pods("gateway")) == 2
    (ingress,) = release.get("ingresses")["items"]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    service = path["backend"]["service"]
    ports = release.get("service", service["name"])["spec"]["ports"]
    assert (rule["host"], service["port"]["name"]) == ("llm.example.com", ports[0]["name"])
    assert service["name"] == "proa-gateway"  # that of the client below
    with release.client() as client:
        assert "Paris" in ask(client.with_options(api_key="first"))
        with pytest.raises(AuthenticationError):
            ask(client)


def test_air_gapped_yaml_with_the_builtin_model(release: Release) -> None:
    """With this cluster's address of the API server, without a GPU and a claim. The pods' user is the image's."""
    (subset,) = json.loads(run("kubectl", "get", "endpoints", "kubernetes", "--output=json"))["subsets"]
    address, port = subset["addresses"][0]["ip"], subset["ports"][0]["port"]
    peers = [{"ipBlock": {"cidr": f"{each['ip']}/32"}} for each in subset["addresses"]]
    pool = {"model": "builtin", "servedModelName": "proa-builtin", "modelVolume": {}, "gpu__allocation": "none"}
    release.install(
        EXAMPLES / "air-gapped.yaml",
        networkPolicy__gateway__egress=[{"ports": [{"protocol": "TCP", "port": port}], "to": peers}],
        **{f"engines__llama-8b__{name}": value for name, value in pool.items()},
    )
    with release.client() as client:
        assert "Paris" in ask(client)
    reached = {}
    for component in ("gateway", "engine"):
        (pod,) = release.pods(component)
        assert not {"runAsUser", "runAsGroup", "fsGroup"} & pod["spec"]["securityContext"].keys()
        command = ["exec", pod["metadata"]["name"], f"--container={component}", "--"]
        assert release.kubectl(*command, "id", "-u").strip() == "65532"
        output = release.kubectl(*command, "python3", "-c", CONNECT, address, str(port), check=False)
        reached[component] = "connected" in output
    assert reached == {"gateway": True, "engine": False}
