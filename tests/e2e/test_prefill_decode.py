"""Prompts computed by one pool and continued by another, whose engines come and go under load."""

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from support.certificates import serial_of, signed
from support.kube import Release, eventually
from support.traffic import Texts, traffic

EXCHANGE = {
    "hostCache": {"sizeGb": 0.25},
    "kvTransfer": {"enabled": True},
    "extraArgs": ["--num-gpu-blocks-override=2000"],
}
POOLS = {
    "prompts": {**EXCHANGE, "role": "prefill"},
    "answers": {**EXCHANGE, "role": "decode", "replicas": 2, "drainSeconds": 2},
}
DEPLOYMENTS = ("proa-engine-prompts", "proa-engine-answers")
LOAD = (
    *("--clients=20", "--requests=2", "--items=60", "--max-tokens=150", "--ignore-eos"),
    *("--temperature=0.7", "--timeout=180"),
)
CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 50061), 3).close(); print('connected')"

VERBS = ("get", "list", "create", "patch", "update", "delete")


@pytest.fixture(scope="module")
def expected(release: Release) -> Texts:
    """What one engine that computes everything itself generates."""
    with traffic(release, *LOAD) as running:
        return running.texts()


def install(release: Release, **more: str) -> None:
    release.install(
        engines=POOLS,
        gateway__kvTransfer={"minRemotePrefillTokens": 256},
        gateway__extraArgs=["--enable-dev-endpoints"],
        gateway__podDeletionCost=True,
        **more,
    )


@pytest.fixture(scope="module", autouse=True)
def _pools(release: Release, expected: Texts) -> None:
    install(release)


def names(release: Release, pool: str) -> list[str]:
    pods = release.pods("engine")
    return [pod["metadata"]["name"] for pod in pods if pod["metadata"]["labels"]["proa/pool"] == pool]


def fetched_tokens(release: Release) -> float:
    """Tokens whose blocks decode engines got from other engines."""
    return sum(release.metric(pod, "proa_engine_kv_fetched_tokens_total") for pod in names(release, "answers"))


def check_under_load(release: Release, expected: Texts, disturb: Callable[[], object]) -> None:
    """Call `disturb` at a random time while blocks travel. Raises AssertionError if a request fails or differs."""
    release.reset_prefix_caches()
    before = fetched_tokens(release)
    with traffic(release, *LOAD) as running:
        eventually("decode engines fetch blocks", lambda: fetched_tokens(release) > before + 500)
        delay = random.uniform(0, 5)
        release.report(f"disturbed after {delay:.1f} s")
        time.sleep(delay)
        disturb()
        assert running.texts() == expected
    release.wait_for_rollout(*DEPLOYMENTS)


def test_long_prompts_come_from_the_prefill_pool(release: Release, expected: Texts) -> None:
    with traffic(release, *LOAD) as running:
        assert running.texts() == expected
    (prompts,) = names(release, "prompts")
    assert release.generated_tokens(prompts) == 0
    assert fetched_tokens(release) > 2000
    assert release.gateway_metric('proa_gateway_kv_sources_total{kind="prefill"}') > 2


def test_no_request_fails_when_the_prefill_pod_is_lost(release: Release, expected: Texts) -> None:
    (doomed,) = names(release, "prompts")
    command = ("delete", "pod", doomed, "--force", "--grace-period=0", "--wait=false")
    check_under_load(release, expected, lambda: release.kubectl(*command))


def test_requests_of_a_drained_decode_engine_move_with_their_blocks(release: Release, expected: Texts) -> None:
    doomed, _ = names(release, "answers")

    def drain() -> None:
        eventually("the engine is generating", lambda: release.metric(doomed, "vllm:num_requests_running") > 2)
        release.kubectl("delete", "pod", doomed, "--wait=false")

    check_under_load(release, expected, drain)
    assert release.gateway_metric('proa_gateway_kv_sources_total{kind="drain"}') > 0


def test_no_request_fails_when_the_prefill_engine_is_killed(release: Release, expected: Texts) -> None:
    """After the other losses: gateways avoid an address at which fetches failed for a minute."""
    (doomed,) = names(release, "prompts")
    check_under_load(release, expected, lambda: release.kill_at_next_work(doomed, "engine"))


def test_gateways_may_annotate_pods_and_no_more(release: Release) -> None:
    account = f"--as=system:serviceaccount:{release.namespace}:proa-gateway"
    allowed = {verb: release.kubectl("auth", "can-i", verb, "pods", account, check=False) for verb in VERBS}
    assert [verb for verb, answer in allowed.items() if answer.strip() == "yes"] == ["patch"]


def test_only_engines_of_the_model_reach_the_movers(release: Release) -> None:
    def connects(pod: str, container: str, address: str) -> bool:
        command = ["exec", pod, f"--container={container}", "--", "python3", "-c", CONNECT, address]
        return "connected" in release.kubectl(*command, check=False)

    addresses = {pod["metadata"]["name"]: pod["status"]["podIP"] for pod in release.pods("engine")}
    (prompts,) = names(release, "prompts")
    (gateway,) = release.pods("gateway")
    with traffic(release, "--clients=1", labels={"app": "other"}) as other:
        for name in names(release, "answers"):
            assert connects(prompts, "engine", addresses[name])
            assert connects(name, "engine", addresses[prompts])
            assert not connects(other.pod, "script", addresses[name])
            assert not connects(gateway["metadata"]["name"], "gateway", addresses[name])


def test_blocks_travel_encrypted(release: Release, expected: Texts, tmp_path: Path) -> None:
    made = signed(tmp_path / "tls")
    files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.authority}
    release.kubectl(
        "create", "secret", "generic", "tls", *(f"--from-file={name}={path}" for name, path in files.items())
    )
    install(release, tls__existingSecret="tls")
    with traffic(release, *LOAD) as running:
        assert running.texts() == expected
    assert fetched_tokens(release) > 1000
    (prompts,) = [pod for pod in release.pods("engine") if pod["metadata"]["labels"]["proa/pool"] == "prompts"]
    script = f"import ssl; print(ssl.get_server_certificate(('{prompts['status']['podIP']}', 50061), timeout=3))"
    page = release.kubectl("exec", names(release, "answers")[0], "--container=engine", "--", "python3", "-c", script)
    assert serial_of(page) == made.serial
