"""Traffic from inside the cluster: a pod of streaming clients, and the outcome of each of their requests."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from secrets import token_hex

from support.kube import Release, eventually
from support.script_pod import script_pod

Texts = dict[tuple[int, int], str]
"""By client and request number."""
_SCRIPT = Path(__file__).with_name("load_pod.py")


@dataclass(frozen=True, slots=True)
class Answer:
    """One request. Times in Unix seconds; `silence`: longest time between two events; `error`: empty for success."""

    client: int
    index: int  # of the client's requests
    question: str
    text: str
    events: int
    silence: float
    finish_reason: str | None
    error: str
    prompt_tokens: int
    cached_tokens: int
    began: float
    ended: float


class Traffic:
    """A pod of clients. Answers can be read while it runs and after it has ended."""

    def __init__(self, release: Release, pod: str) -> None:
        self.pod = pod
        self._release = release

    def answers(self) -> list[Answer]:
        """All requests that have ended so far."""
        names = [field.name for field in fields(Answer)]
        lines = self._release.kubectl("logs", self.pod, "--tail=-1").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [Answer(**{name: record[name] for name in names}) for record in records]

    def failures(self) -> list[str]:
        return [answer.error for answer in self.answers() if answer.error]

    def texts(self) -> Texts:
        """Wait until all clients have finished, and return their texts. Raises AssertionError if a request failed."""
        self.join(600)
        assert self.failures() == []
        return {(answer.client, answer.index): answer.text for answer in self.answers()}

    def wait_for(self, count: int, seconds: float = 180) -> None:
        """Wait until `count` more requests have ended."""
        before = len(self.answers())
        eventually(f"{count} more requests end", lambda: len(self.answers()) >= before + count, seconds)

    def stop(self) -> None:
        """Let every client finish its current request, and wait for that."""
        self._release.kubectl("exec", self.pod, "--", "touch", "/tmp/stop", check=False)
        self.join()

    def join(self, seconds: float = 180) -> None:
        """Wait until all clients have finished."""

        def ended() -> bool:
            return self._release.get("pod", self.pod)["status"]["phase"] in ("Succeeded", "Failed")

        eventually("the clients finish", ended, seconds)


@contextmanager
def traffic(
    release: Release, *arguments: str, node: str | None = None, labels: dict[str, str] | None = None
) -> Iterator[Traffic]:
    """Clients of the release's gateway, with the arguments of load_pod.py, running on entry; on `node`, if given."""
    name = f"traffic-{token_hex(3)}"
    selector = {"kubernetes.io/hostname": node} if node else {}
    host = f"--host={release.name}-gateway"
    with script_pod(release, name, _SCRIPT, host, *arguments, labels=labels, nodeSelector=selector):
        yield Traffic(release, name)
