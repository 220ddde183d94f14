"""The names under which a gateway without API keys answers."""

import pytest

from proa_gateway.errors import HostNotAllowed
from proa_gateway.http.middleware import AllowedHosts, parse_host_pattern

PATTERNS = ("llm.example.com", "*.internal.example", "proa-gateway.ns.svc.cluster.local")


@pytest.fixture
def hosts(monkeypatch: pytest.MonkeyPatch) -> AllowedHosts:
    monkeypatch.setattr("socket.gethostname", lambda: "Box7.lan")
    return AllowedHosts.of_machine("gateway.here", map(parse_host_pattern, PATTERNS))


@pytest.mark.parametrize(
    "header",
    [
        "",  # no browser leaves it out
        "127.0.0.1",
        "10.2.3.4:8000",
        "[::1]:8000",
        "[fe80::1%25eth0]",
        "[2001:db8::1]",
        "localhost:8000",
        "LOCALHOST.",
        "a.localhost",
        "proa-gateway",
        "proa-gateway:80",
        "box7.lan:8000",
        "box7.lan.local",
        "gateway.here",
        "llm.example.com:443",
        "LLM.Example.com.",
        "a.b.internal.example",
        "proa-gateway.ns.svc.cluster.local:80",
    ],
)
def test_addresses_and_names_of_the_gateway_are_allowed(hosts: AllowedHosts, header: str) -> None:
    hosts.check(header)


@pytest.mark.parametrize(
    "header",
    [
        "attacker.example",
        "attacker.example:8000",
        "127.0.0.1.attacker.example",
        "localhost.attacker.example",
        "llm.example.com.attacker.example",
        "evil-llm.example.com",
        "evilinternal.example",
        "internal.example",
        "proa-gateway.ns.svc.attacker.example",
        "attacker.example:80:80",
        "x" * 500 + ".example",
    ],
)
def test_other_names_are_refused_and_the_option_is_named(hosts: AllowedHosts, header: str) -> None:
    with pytest.raises(HostNotAllowed, match="--allowed-hosts") as raised:
        hosts.check(header)
    assert header[:60].partition(":")[0] in raised.value.message
    assert len(raised.value.message) < 500


def test_a_star_allows_any_name() -> None:
    AllowedHosts(["*"]).check("attacker.example")


@pytest.mark.parametrize("text", ["", "a b", "http://a", "a:80", "*.", "a.*", "**", "a/b", "-x.y z"])
def test_patterns_are_names(text: str) -> None:
    with pytest.raises(ValueError, match="host name"):
        parse_host_pattern(text)
