"""Run one of this folder's scripts as a pod from the gateway's image."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.kube import Release


@contextmanager
def script_pod(
    release: Release,
    name: str,
    script: Path,
    *arguments: str,
    port: int | None = None,
    labels: Mapping[str, str] | None = None,
    volumes: Mapping[str, Any] | None = None,
    **spec: Any,
) -> Iterator[None]:
    """A pod that runs `script`; ready on entry (listening on `port`, if given), deleted on exit.

    `volumes` maps a name to a volume source, mounted at /NAME. `spec` adds fields to the pod's spec.
    """
    release.kubectl("create", "configmap", name, f"--from-file={script.name}={script}")
    sources = {"script": {"configMap": {"name": name}}, "tmp": {"emptyDir": {}}, **(volumes or {})}
    container = {
        "name": "script",
        "image": f"{release.registry}/proa-gateway:{release.tag}",
        "command": ["python3", f"/script/{script.name}", *arguments],
        "volumeMounts": [{"name": volume, "mountPath": f"/{volume}"} for volume in sources],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    if port:
        container["readinessProbe"] = {"tcpSocket": {"port": port}, "periodSeconds": 1}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {**(labels or {})}},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": "serviceAccountName" in spec,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
            "volumes": [{"name": volume, **source} for volume, source in sources.items()],
            **spec,
        },
    }
    try:
        release.apply(pod)
        release.wait_for_pod(name)
        yield
    finally:
        release.kubectl("delete", f"pod/{name}", f"configmap/{name}", "--wait=false", "--grace-period=1", check=False)
