"""KEDA scales a pool by what its gateways tell it: from zero for a held request, and back to zero.

Skipped if the cluster has no KEDA and `scripts/keda` has not compiled it. Not a smoke test.
"""

import time
from collections.abc import Iterator

import pytest

from support.chat import ask
from support.keda import keda
from support.kube import Release, eventually

DEPLOYMENT = "deployment/proa-engine-builtin"


@pytest.fixture(scope="module")
def _keda(release: Release, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with keda(release, tmp_path_factory.mktemp("keda")):
        yield


@pytest.mark.usefixtures("_keda")
def test_a_pool_without_engines_starts_one_for_a_request_and_stops_it_afterwards(release: Release) -> None:
    """With two gateways, of which KEDA listens to one; NetworkPolicies hold."""
    release.install(
        gateway__replicas="2",
        gateway__scaleFromZero__timeoutSeconds="180",
        engines__builtin__keda__enabled="true",
        engines__builtin__keda__maxReplicas="1",
        engines__builtin__keda__cooldownSeconds="20",
    )
    eventually("KEDA removes the engine", lambda: no_engine(release), 180)
    for _ in range(2):  # usually one by each gateway
        with release.client() as client:
            started = time.monotonic()
            assert "Paris" in ask(client.with_options(timeout=200))
        print(f"from zero engines to an answer: {time.monotonic() - started:.1f} s")
        eventually("KEDA removes the engine again", lambda: no_engine(release), 180)


def no_engine(release: Release) -> bool:
    return release.get(DEPLOYMENT)["spec"]["replicas"] == 0 and not release.get("pods", release.selector("engine")).get(
        "items"
    )
