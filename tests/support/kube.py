"""A Helm release on whatever cluster KUBECONFIG points to, driven through kubectl and helm as a person would."""

import json
import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

CHART = Path(__file__).parents[2] / "charts" / "proa"
_READ_METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9400/metrics').read().decode())"

# Nobody inside a container can send its first process a signal that it ignores, but the kernel does.
_KILL_AT_NEXT_WORK = "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))"


def run(*command: str, timeout: float = 300, check: bool = True, stdin: str = "") -> str:
    """Run a command and return what it prints; an error carries both of its streams."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, input=stdin)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Release:
    """One release of the chart in a namespace of its own."""

    name: str
    namespace: str
    registry: str
    tag: str

    def kubectl(self, *arguments: str, timeout: float = 300, check: bool = True) -> str:
        return run("kubectl", "--namespace", self.namespace, *arguments, timeout=timeout, check=check)

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def make_namespace(self) -> None:
        """The namespace, which admits only pods of the standard that is called restricted."""
        run("kubectl", "create", "namespace", self.namespace)
        run("kubectl", "label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")

    def install(self, **values: str) -> None:
        """Install or upgrade with `--set` values, dots written as double underscores, and wait until it is ready."""
        self._helm_upgrade(values, "--wait", "--timeout=10m")

    def upgrade(self, **values: str) -> None:
        """The same, without waiting."""
        self._helm_upgrade(values)

    def uninstall(self) -> None:
        run("helm", "uninstall", self.name, "--namespace", self.namespace, "--wait", "--timeout=5m", timeout=330)

    def selector(self, component: str) -> str:
        return f"--selector=app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"

    def pods(self, component: str) -> list[Any]:
        """The pods of a component that are not on their way out."""
        pods = self.get("pods", self.selector(component))["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def metric(self, pod: str, name: str) -> float:
        """The sum of a metric's values over its labels, from an engine pod's own metrics, read from inside: a network
        policy keeps others away."""
        page = self.kubectl("exec", pod, "--container=engine", "--", "python3", "-c", _READ_METRICS)
        return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})?\s+(\S+)", page, re.M))

    def generated_tokens(self, pod: str) -> float:
        return self.metric(pod, "vllm:generation_tokens_total")

    def kill_at_next_work(self, pod: str, container: str) -> None:
        """The container's first process ends by SIGKILL as soon as it computes again."""
        self.kubectl("exec", pod, f"--container={container}", "--", "python", "-c", _KILL_AT_NEXT_WORK)

    def describe(self) -> str:
        """Pods, events and the ends of all logs, for people who look into a failure."""
        selector = f"--selector=app.kubernetes.io/instance={self.name}"
        commands = (
            ["get", "pods", "--output=wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["logs", selector, "--all-containers", "--prefix", "--tail=60"],
        )
        return "\n".join(self.kubectl(*command, check=False) for command in commands)

    def _helm_upgrade(self, values: dict[str, str], *options: str) -> None:
        values = {"engine__image__tag": self.tag, "gateway__image__tag": self.tag} | values
        settings = [f"--set={key.replace('__', '.')}={value}" for key, value in values.items()]
        # The cluster's engines share few cores, and threads that spin for each other would stall them all.
        threads = '--set-json=engines.builtin.env=[{"name": "OMP_NUM_THREADS", "value": "1"}]'
        command = ["helm", "upgrade", "--install", self.name, str(CHART), "--namespace", self.namespace]
        run(*command, *options, f"--set=image.registry={self.registry}", threads, *settings, timeout=660)

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        """The official client, which never tries again by itself, through a port-forward to the gateway's Service."""
        command = ["kubectl", "--namespace", self.namespace, "port-forward", f"service/{self.name}-gateway", ":80"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                match = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
                assert match, "kubectl port-forward named no port"
                with OpenAI(
                    base_url=f"http://127.0.0.1:{match[1]}/v1", api_key="none", timeout=60, max_retries=0
                ) as client:
                    yield client
            finally:
                process.terminate()


def eventually(claim: str, check: Any, seconds: float = 120) -> Any:
    """Wait until `check()` is true and return what it returned; fail with the claim after so many seconds."""
    deadline = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {claim}"
        time.sleep(0.5)
    return result
