"""The LeaderWorkerSet controller (sigs.k8s.io/lws), run as a process beside the tests for as long as they need it."""

import base64
import json
import os
import socket
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.certificates import Certificate, self_signed
from support.kube import eventually, run
from support.processes import free_port

TOOLS = Path(__file__).parents[2] / ".tools"
MANIFESTS = TOOLS / "lws"
CRD = "leaderworkersets.leaderworkerset.x-k8s.io"
API = "/apis/leaderworkerset.x-k8s.io/v1"
PODS_OF_SETS = {"matchExpressions": [{"key": "leaderworkerset.sigs.k8s.io/name", "operator": "Exists"}]}


@contextmanager
def controller(folder: Path) -> Iterator[None]:
    """Run the controller until the block ends. Does nothing if the cluster has the CRD, and so a controller of its own.

    The API server calls the controller's webhooks at `localhost`: the tests must run on its machine, as in a cluster of
    one machine. Skips the tests if `scripts/lws` has not compiled the controller. `folder` is for its files.
    """
    if run("kubectl", "get", "crd", CRD, "--output=name", check=False):
        yield
        return
    if not (TOOLS / "bin" / "lws").exists():
        pytest.skip("not run: the cluster has no LeaderWorkerSets, and scripts/lws has not compiled their controller")
    crds = [yaml.safe_load(file.read_text()) for file in sorted((MANIFESTS / "crd" / "bases").iterdir())]
    port, certificate = free_port(), self_signed(folder, "localhost")
    hooks = webhooks(port, certificate)
    try:
        apply(crds)
        eventually("the cluster serves the API", lambda: run("kubectl", "get", "--raw", API, check=False), seconds=60)
        with (folder / "lws.log").open("w") as log, process(folder, port, log):
            eventually("the controller's webhooks are served", lambda: accepts(port), seconds=60)
            apply(hooks)
            yield
    finally:
        for each in [*hooks, *crds]:  # first the webhooks, without which pods could not be created
            run("kubectl", "delete", each["kind"], each["metadata"]["name"], "--ignore-not-found", "--timeout=60s")


@contextmanager
def process(folder: Path, port: int, log: Any) -> Iterator[None]:
    """The controller's process, stopped at the end of the block."""
    configuration = folder / "configuration.json"
    configuration.write_text(
        json.dumps(
            {
                "apiVersion": "config.lws.x-k8s.io/v1alpha1",
                "kind": "Configuration",
                "leaderElection": {"leaderElect": False},
                "internalCertManagement": {"enable": False},
                "webhook": {"port": port, "certDir": str(folder)},
                "metrics": {"bindAddress": "0"},
                "health": {"healthProbeBindAddress": "0"},
            }
        )
    )
    command = [str(TOOLS / "bin" / "lws"), f"--config={configuration}"]
    with subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=os.environ) as running:
        try:
            yield
        finally:
            running.terminate()
            try:
                running.wait(30)
            except subprocess.TimeoutExpired:
                running.kill()


def webhooks(port: int, certificate: Certificate) -> list[Any]:
    """The project's webhook configurations, called at `port` of the API server's machine. Those of pods are called for
    pods of LeaderWorkerSets only."""
    bundle = base64.b64encode(certificate.certificate.read_bytes()).decode()
    found = [each for each in yaml.safe_load_all((MANIFESTS / "webhook" / "manifests.yaml").read_text()) if each]
    for configuration in found:
        configuration["metadata"]["name"] = f"lws-{configuration['metadata']['name']}"
        for hook in configuration["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            hook["clientConfig"] = {"url": f"https://localhost:{port}{path}", "caBundle": bundle}
            if hook["rules"][0]["resources"] == ["pods"]:
                hook["objectSelector"] = PODS_OF_SETS
    return found


def apply(manifests: list[Any]) -> None:
    objects = {"apiVersion": "v1", "kind": "List", "items": manifests}
    run("kubectl", "apply", "--server-side", "--filename=-", stdin=json.dumps(objects))


def accepts(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True
