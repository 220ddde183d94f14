"""Traffic from inside the cluster: a pod of streaming clients, and what became of each of their requests."""

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from secrets import token_hex
from typing import Any

from support.kube import Release, eventually, run

_SCRIPT = Path(__file__).with_name("load_pod.py")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Times in Unix seconds; `silence` is the longest pause between events; `error` empty: all well."""

    client: int
    index: int  # of the client's requests
    question: str
    text: str
    events: int
    silence: float
    finish_reason: str | None
    error: str
    began: float
    ended: float


class Traffic:
    """A running pod of clients. Answers can be read while it runs; nothing is lost when it ends."""

    def __init__(self, release: Release, pod: str) -> None:
        self.pod = pod
        self._release = release

    def answers(self) -> list[Answer]:
        """All that has ended so far."""
        names = [field.name for field in fields(Answer)]
        lines = self._release.kubectl("logs", self.pod, "--tail=-1").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [Answer(**{name: record[name] for name in names}) for record in records]

    def failures(self) -> list[str]:
        return [answer.error for answer in self.answers() if answer.error]

    def wait_for(self, count: int, seconds: float = 180) -> None:
        """Until so many more requests than now have ended."""
        before = len(self.answers())
        eventually(f"{count} more requests end", lambda: len(self.answers()) >= before + count, seconds)

    def stop(self) -> None:
        """Let every client finish the request that it is at."""
        self._release.kubectl("exec", self.pod, "--", "touch", "/tmp/stop", check=False)
        self.join()

    def join(self, seconds: float = 180) -> None:
        """Until all clients have finished."""

        def ended() -> bool:
            return self._release.get("pod", self.pod)["status"]["phase"] in ("Succeeded", "Failed")

        eventually("the clients finish", ended, seconds)


@contextmanager
def traffic(
    release: Release, *arguments: str, node: str | None = None, labels: dict[str, str] | None = None
) -> Iterator[Traffic]:
    """Clients of the release's gateway, with the arguments of load_pod.py, on the named node; running on entry."""
    name = f"traffic-{token_hex(3)}"
    release.kubectl("create", "configmap", name, f"--from-file=load.py={_SCRIPT}")
    manifest = _pod(release, name, arguments, node, labels or {})
    run("kubectl", "--namespace", release.namespace, "apply", "--filename=-", stdin=json.dumps(manifest))
    running = Traffic(release, name)
    try:
        release.kubectl(
            "wait", f"pod/{name}", "--for=jsonpath={.status.containerStatuses[0].started}=true", "--timeout=2m"
        )
        yield running
    finally:
        release.kubectl("delete", f"pod/{name}", f"configmap/{name}", "--wait=false", "--grace-period=1", check=False)


def _pod(
    release: Release, name: str, arguments: Sequence[str], node: str | None, labels: dict[str, str]
) -> dict[str, Any]:
    container = {
        "name": "load",
        "image": f"{release.registry}/proa-gateway:{release.tag}",
        "command": ["python3", "/load/load.py", f"--host={release.name}-gateway", *arguments],
        "volumeMounts": [{"name": "load", "mountPath": "/load"}, {"name": "tmp", "mountPath": "/tmp"}],
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": labels},
        "spec": {
            "restartPolicy": "Never",
            "automountServiceAccountToken": False,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "nodeSelector": {"kubernetes.io/hostname": node} if node else {},
            "containers": [container],
            "volumes": [{"name": "load", "configMap": {"name": name}}, {"name": "tmp", "emptyDir": {}}],
        },
    }
