"""Network policies, API keys and mutual TLS, with Secrets that change while requests run.

In every end-to-end test the namespace enforces the `restricted` Pod Security Standard.
"""

import base64
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from openai import AuthenticationError

from support.certificates import serial_of, signed
from support.chat import ask
from support.kube import Release, eventually, run
from support.traffic import traffic

CONNECT = "import socket, sys; socket.create_connection((sys.argv[1], 50051), 3).close()"


def restarts(release: Release) -> dict[str, int]:
    """Container restarts by pod."""
    pods = [pod for component in ("gateway", "engine") for pod in release.pods(component)]
    return {
        pod["metadata"]["name"]: sum(status["restartCount"] for status in pod["status"]["containerStatuses"])
        for pod in pods
    }


@pytest.fixture
def engine_address(release: Release) -> str:
    (pod,) = release.pods("engine")
    return str(pod["status"]["podIP"])


@pytest.fixture
def other_pod(release: Release) -> Iterator[str]:
    """The name of a pod that is not part of the release, with label app=other."""
    with traffic(release, "--clients=1", labels={"app": "other"}) as running:
        yield running.pod


def can_connect(release: Release, pod: str, address: str) -> bool:
    command = ["exec", pod, "--", "python3", "-c", f"{CONNECT}; print('connected')", address]
    return "connected" in release.kubectl(*command, check=False)


def test_only_the_gateway_reaches_the_engine(release: Release, other_pod: str, engine_address: str) -> None:
    (gateway,) = release.pods("gateway")
    assert can_connect(release, gateway["metadata"]["name"], engine_address)
    assert not can_connect(release, other_pod, engine_address)


def test_a_peer_in_the_network_policy_reaches_the_engine(release: Release, other_pod: str) -> None:
    release.install(**{"networkPolicy__engine__from[0]__podSelector__matchLabels__app": "other"})
    (pod,) = release.pods("engine")
    address = str(pod["status"]["podIP"])
    eventually("the pod can connect", lambda: can_connect(release, other_pod, address), seconds=30)
    release.install()


def write_keys(release: Release, *keys: str) -> None:
    """Create or replace the Secret with these API keys."""
    entries = [{"name": f"team-{index}", "key": key} for index, key in enumerate(keys)]
    data = base64.b64encode(json.dumps({"keys": entries}).encode()).decode()
    secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": "keys"}, "data": {"keys.json": data}}
    run("kubectl", "--namespace", release.namespace, "apply", "--filename=-", stdin=json.dumps(secret))


def test_api_keys_rotate_without_a_restart(release: Release) -> None:
    write_keys(release, "first")
    release.install(gateway__apiKeys__existingSecret="keys")
    with release.client() as client:
        assert "Paris" in ask(client.with_options(api_key="first"))
        with pytest.raises(AuthenticationError):
            ask(client.with_options(api_key="second"))
        before = restarts(release)
        write_keys(release, "second")

        def is_rotated() -> bool:
            try:
                return "Paris" in ask(client.with_options(api_key="second"))
            except AuthenticationError:
                return False

        eventually("the new key is accepted", is_rotated, seconds=180)
        with pytest.raises(AuthenticationError):
            ask(client.with_options(api_key="first"))
    assert restarts(release) == before
    release.install()


def write_certificates(release: Release, folder: Path) -> str:
    """Create or replace the Secret `tls` with a certificate of a new CA; return the certificate's serial number."""
    made = signed(folder)
    files = {"tls.crt": made.certificate, "tls.key": made.key, "ca.crt": made.authority}
    sources = [f"--from-file={name}={path}" for name, path in files.items()]
    manifest = release.kubectl("create", "secret", "generic", "tls", *sources, "--dry-run=client", "--output=json")
    run("kubectl", "--namespace", release.namespace, "apply", "--filename=-", stdin=manifest)
    return made.serial


def served_serial(release: Release) -> str:
    """The serial number of the certificate that the engine presents."""
    (engine,) = release.pods("engine")
    script = "import ssl, sys; print(ssl.get_server_certificate((sys.argv[1], 50051), timeout=3))"  # verifies nothing
    (gateway,) = release.pods("gateway")
    command = ["exec", gateway["metadata"]["name"], "--", "python3", "-c", script, str(engine["status"]["podIP"])]
    return serial_of(release.kubectl(*command, check=False))


def test_certificates_rotate_without_a_restart_and_without_a_failed_request(release: Release, tmp_path: Path) -> None:
    first = write_certificates(release, tmp_path / "first")
    release.install(tls__existingSecret="tls")
    with release.client() as client:
        assert "Paris" in ask(client)
    assert served_serial(release) == first
    before = restarts(release)
    with traffic(release, "--clients=4") as running:
        running.wait_for(8)
        second = write_certificates(release, tmp_path / "second")
        eventually("the engine presents the new certificate", lambda: served_serial(release) == second, seconds=180)
        running.wait_for(8)
        running.stop()
        assert running.failures() == []
    assert restarts(release) == before
