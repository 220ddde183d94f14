"""The connections that the chart's network policies allow."""

from typing import Any

from support.chart import PREFILL_AND_DECODE, lookup, needs_helm, render

pytestmark = needs_helm
PROMETHEUS = {"podSelector": {"matchLabels": {"app": "prometheus"}}}
FRIEND = {"podSelector": {"matchLabels": {"app": "friend"}}}


def policy(component: str, values: dict[str, Any] | None = None) -> Any:
    return lookup(render(values), "NetworkPolicy", f"proa-{component}", "spec")


def selects(component: str) -> dict[str, Any]:
    names = {"name": "proa", "instance": "proa", "component": component}
    return {"podSelector": {"matchLabels": {f"app.kubernetes.io/{key}": name for key, name in names.items()}}}


def ports(rule: Any) -> set[int]:
    return {port["port"] for port in rule["ports"]}


def test_only_gateways_connect_to_the_engines_grpc_port() -> None:
    grpc, _metrics = policy("engine")["ingress"]
    assert grpc["from"] == [selects("gateway")]
    assert ports(grpc) == {50051}


def test_listed_peers_connect_to_the_engines_grpc_port() -> None:
    grpc, _metrics = policy("engine", {"networkPolicy.engine.from": [FRIEND]})["ingress"]
    assert grpc["from"] == [selects("gateway"), FRIEND]


def test_metrics_are_read_by_every_pod_or_by_listed_peers_only() -> None:
    assert policy("engine")["ingress"][1] == {
        "from": [{"namespaceSelector": {}}],
        "ports": [{"protocol": "TCP", "port": 9400}],
    }
    assert len(policy("engine", {"networkPolicy.metrics.from": []})["ingress"]) == 1


def test_all_clients_connect_to_the_gateway_by_default() -> None:
    assert policy("gateway")["ingress"] == [{"ports": [{"protocol": "TCP", "port": 8000}]}]


def test_the_helm_test_always_connects_to_the_gateway() -> None:
    (rule,) = policy("gateway", {"networkPolicy.gateway.from": [FRIEND]})["ingress"]
    assert rule["from"] == [selects("test"), FRIEND]
    assert (
        selects("test")["podSelector"]["matchLabels"].items()
        <= lookup(render(), "Pod", "proa-test-builtin", "metadata", "labels").items()
    )


def test_prometheus_connects_to_a_gateway_with_listed_peers() -> None:
    named = {"networkPolicy.gateway.from": [FRIEND], "networkPolicy.metrics.from": [PROMETHEUS]}
    (rule,) = policy("gateway", {**named, "monitoring.enabled": True})["ingress"]
    assert rule["from"] == [selects("test"), FRIEND, PROMETHEUS]
    (rule,) = policy("gateway", named)["ingress"]
    assert PROMETHEUS not in rule["from"]


def test_the_gateway_connects_to_engines_dns_and_the_api_server() -> None:
    engines, dns, api_server = policy("gateway")["egress"]
    assert engines == {"to": [selects("engine")], "ports": [{"protocol": "TCP", "port": 50051}]}
    assert ports(dns) == {53}
    assert ports(api_server) == {443, 6443}


def test_the_gateway_fetches_images_of_allowed_domains_from_public_addresses() -> None:
    values = {"gateway.images.allowedMediaDomains": ["cats.example"], "networkPolicy.gateway.egress": []}
    *_, images = policy("gateway", values)["egress"]
    assert ports(images) == {80, 443}
    assert [peer["ipBlock"]["cidr"] for peer in images["to"]] == ["0.0.0.0/0", "::/0"]
    refused = {address for peer in images["to"] for address in peer["ipBlock"]["except"]}
    assert {"10.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fe80::/10"} <= refused


def test_traces_are_allowed_to_listed_peers_if_configured() -> None:
    collector = {"otel.OTEL_EXPORTER_OTLP_ENDPOINT": "http://collector:4317", "networkPolicy.otlp.to": [FRIEND]}
    for component in ("gateway", "engine"):
        assert not any(4317 in ports(rule) for rule in policy(component)["egress"])
        (rule,) = [rule for rule in policy(component, collector)["egress"] if 4317 in ports(rule)]
        assert rule["to"] == [FRIEND]


def test_only_engines_of_the_same_model_reach_the_movers() -> None:
    exchange = {"hostCache": {"sizeGb": 1}, "kvTransfer": {"enabled": True}}
    pools = {
        "one": exchange,
        "two": {**exchange, "tensorParallelSize": 2},
        "big": {**exchange, "model": "org/big"},
        "none": {},
    }
    objects = render({"engines": pools})
    policies = {
        name: lookup(objects, "NetworkPolicy", f"proa-engine-{name}-kv", "spec") for name in ("one", "two", "big")
    }
    assert ("NetworkPolicy", "proa-engine-none-kv") not in objects
    labels = {
        name: lookup(objects, "Deployment", f"proa-engine-{name}", "spec", "template", "metadata", "labels")
        for name in pools
    }
    for name, found in policies.items():
        assert found["podSelector"]["matchLabels"].items() <= labels[name].items()
        ((peer,),) = [rule["from"] for rule in found["ingress"]]
        assert found["egress"] == [{"to": [peer], "ports": found["ingress"][0]["ports"]}]
        reached = {other for other in pools if peer["podSelector"]["matchLabels"].items() <= labels[other].items()}
        assert reached == ({"big"} if name == "big" else {"one", "two", "none"})
    assert [policies[name]["ingress"][0]["ports"][0]["endPort"] for name in ("one", "two")] == [50061, 50062]
    for rule in lookup(objects, "NetworkPolicy", "proa-engine", "spec", "ingress"):
        assert not ports(rule) & {50061, 50062}


def test_without_policies_nothing_is_restricted() -> None:
    assert not any(
        kind == "NetworkPolicy" for kind, _ in render({**PREFILL_AND_DECODE, "networkPolicy.enabled": False})
    )
