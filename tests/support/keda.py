"""KEDA's operator (github.com/kedacore/keda), run in a pod of the namespace `keda`."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.certificates import self_signed
from support.kube import Release, eventually, run

TOOLS = Path(__file__).parents[2] / ".tools"
OPERATOR = TOOLS / "bin" / "keda-operator"
CRDS = TOOLS / "keda" / "crd" / "bases"
NAMESPACE = "keda"
CRD = "scaledobjects.keda.sh"
WAIT_FOR_PROGRAM = "until [ -e /program/complete ]; do sleep 0.2; done; exec /program/keda-operator --cert-dir=/certs"


@contextmanager
def keda(release: Release, folder: Path) -> Iterator[None]:
    """Run the operator until the block ends. Does nothing if the cluster has KEDA.

    The pod runs from the gateway's image; the program is copied into it. Skips the tests if `scripts/keda` has not
    compiled it. `folder` is for files of this function.
    """
    if run("kubectl", "get", "crd", CRD, "--output=name", check=False):
        yield
        return
    if not OPERATOR.exists():
        pytest.skip("not run: the cluster has no KEDA, and scripts/keda has not compiled it")
    crds = [yaml.safe_load(file.read_text()) for file in sorted(CRDS.iterdir())]
    names = [each["metadata"]["name"] for each in crds]
    tls = self_signed(folder, f"keda-operator.{NAMESPACE}.svc")
    files = {"tls.crt": tls.certificate, "tls.key": tls.key, "ca.crt": tls.certificate}
    try:
        apply(crds)
        run("kubectl", "create", "namespace", NAMESPACE)
        kubectl("create", "secret", "generic", "certs", *(f"--from-file={name}={path}" for name, path in files.items()))
        kubectl("create", "serviceaccount", "keda-operator")
        run(
            *("kubectl", "create", "clusterrolebinding", "keda-operator", "--clusterrole=cluster-admin"),
            f"--serviceaccount={NAMESPACE}:keda-operator",
        )
        apply([pod(release)])
        kubectl("wait", "--for=jsonpath={.status.phase}=Running", "pod/keda-operator", "--timeout=120s")
        copy_program()
        eventually("KEDA's operator is ready", is_ready, seconds=120)
        yield
    finally:
        log = kubectl("logs", "keda-operator", "--tail=400", check=False)
        (folder / "keda.log").write_text(log)
        run("kubectl", "delete", "crd", *names, "--ignore-not-found", "--timeout=60s", check=False)
        run("kubectl", "delete", "clusterrolebinding", "keda-operator", "--ignore-not-found")
        run("kubectl", "delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s", check=False)


def pod(release: Release) -> dict[str, Any]:
    container = {
        "name": "keda",
        "image": f"{release.registry}/proa-gateway:{release.tag}",
        "command": ["sh", "-c", WAIT_FOR_PROGRAM],
        "env": [{"name": "POD_NAMESPACE", "value": NAMESPACE}, {"name": "WATCH_NAMESPACE", "value": release.namespace}],
        "readinessProbe": {"httpGet": {"path": "/readyz", "port": 8081}, "periodSeconds": 1},
        "volumeMounts": [
            {"name": "program", "mountPath": "/program"},
            {"name": "certs", "mountPath": "/certs", "readOnly": True},
        ],
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "keda-operator", "namespace": NAMESPACE},
        "spec": {
            "serviceAccountName": "keda-operator",
            "terminationGracePeriodSeconds": 1,
            "containers": [container],
            "volumes": [
                {"name": "program", "emptyDir": {}},
                {"name": "certs", "secret": {"secretName": "certs"}},
            ],
        },
    }


def copy_program() -> None:
    """Copy the operator's program into its pod, which then starts it."""
    unpack = "cat > /program/keda-operator && chmod +x /program/keda-operator && touch /program/complete"
    command = ["kubectl", "--namespace", NAMESPACE, "exec", "--stdin", "keda-operator", "--", "sh", "-c", unpack]
    with OPERATOR.open("rb") as program:
        subprocess.run(command, stdin=program, check=True, timeout=300)


def is_ready() -> bool:
    found = json.loads(kubectl("get", "pod/keda-operator", "--output=json"))
    return any(each["type"] == "Ready" and each["status"] == "True" for each in found["status"]["conditions"])


def kubectl(*arguments: str, check: bool = True) -> str:
    return run("kubectl", "--namespace", NAMESPACE, *arguments, check=check)


def apply(manifests: list[Any]) -> None:
    objects = {"apiVersion": "v1", "kind": "List", "items": manifests}
    run("kubectl", "apply", "--server-side", "--filename=-", stdin=json.dumps(objects))
