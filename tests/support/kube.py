"""A Helm release on the cluster of KUBECONFIG, driven with kubectl and helm."""

import json
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from openai import OpenAI

from support.pod_progress import PodProgress

CHART = Path(__file__).parents[2] / "charts" / "proa"
_READ_METRICS = "from urllib.request import urlopen; print(urlopen('http://127.0.0.1:9400/metrics').read().decode())"
_RESET_CACHES = (
    "from urllib.request import Request, urlopen; "
    "urlopen(Request('http://127.0.0.1:8000/reset_prefix_cache', method='POST', "
    "headers={'Content-Type': 'application/json'}), timeout=60)"
)

# A process in a container cannot signal PID 1 unless PID 1 handles the signal. The kernel's CPU time limit can.
_KILL_AT_NEXT_WORK = "import resource; resource.prlimit(1, resource.RLIMIT_CPU, (1, 1))"
_POLL_SECONDS = 2.0

# For engines: they share few cores in these tests, and spinning threads would stall each other.
ONE_THREAD = {"name": "OMP_NUM_THREADS", "value": "1"}


def run(*command: str, timeout: float = 300, check: bool = True, stdin: str = "") -> str:
    """Run a command and return its standard output. Raises AssertionError with both outputs if it fails."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False, input=stdin)
    if check and done.returncode != 0:
        raise AssertionError(f"{' '.join(command)} exited with {done.returncode}:\n{done.stdout}{done.stderr}")
    return done.stdout


@dataclass(frozen=True)
class Release:
    """One release of the chart in its own namespace. `report` prints a line of progress while pods are waited for."""

    name: str
    namespace: str
    registry: str
    tag: str
    report: Callable[[str], None] = print

    def kubectl(self, *arguments: str, timeout: float = 300, check: bool = True) -> str:
        return run("kubectl", "--namespace", self.namespace, *arguments, timeout=timeout, check=check)

    def apply(self, *manifests: Any) -> None:
        objects = {"apiVersion": "v1", "kind": "List", "items": manifests}
        run(
            "kubectl",
            "--namespace",
            self.namespace,
            "apply",
            "--server-side",
            "--filename=-",
            stdin=json.dumps(objects),
        )

    def get(self, *arguments: str) -> Any:
        return json.loads(self.kubectl("get", *arguments, "--output=json"))

    def make_namespace(self) -> None:
        """Create the namespace with the `restricted` Pod Security Standard enforced."""
        run("kubectl", "create", "namespace", self.namespace)
        run("kubectl", "label", "namespace", self.namespace, "pod-security.kubernetes.io/enforce=restricted")

    def install(self, *files: Path, **values: Any) -> None:
        """Install or upgrade and wait until all pods are ready.

        `files` of values, then `values` by path, with `__` for a dot: text as for `--set`, anything else as JSON.
        Without files the built-in model has a pool unless `engines` lists all.
        """
        self._wait_for(*self._helm_upgrade(values, files), "--wait", "--timeout=10m", timeout=660)

    def upgrade(self, **values: Any) -> None:
        """Install or upgrade without waiting."""
        run(*self._helm_upgrade(values))

    def rollback(self) -> None:
        """Return to the previous revision and wait until all pods are ready."""
        command = ["helm", "rollback", self.name, "--namespace", self.namespace, "--wait", "--timeout=10m"]
        self._wait_for(*command, timeout=660)

    def uninstall(self) -> None:
        run("helm", "uninstall", self.name, "--namespace", self.namespace, "--wait", "--timeout=5m", timeout=330)

    def wait_for_rollout(self, *deployments: str) -> None:
        for name in deployments:
            command = ["kubectl", "--namespace", self.namespace, "rollout", "status", f"deployment/{name}"]
            self._wait_for(*command, "--timeout=5m", timeout=330)

    def wait_for_groups(self, *leader_worker_sets: str) -> None:
        """Wait until all groups of the sets are up to date and their leaders ready, for which Helm does not wait."""
        for name in leader_worker_sets:
            command = ["kubectl", "--namespace", self.namespace, "wait", f"leaderworkerset/{name}"]
            self._wait_for(*command, "--for=condition=Available", "--timeout=5m", timeout=330)

    def wait_for_pod(self, name: str, minutes: int = 3) -> None:
        """Wait until the pod is ready."""
        command = ["kubectl", "--namespace", self.namespace, "wait", f"pod/{name}", "--for=condition=Ready"]
        self._wait_for(*command, f"--timeout={minutes}m", timeout=60 * minutes + 30)

    def selector(self, component: str) -> str:
        return f"--selector=app.kubernetes.io/instance={self.name},app.kubernetes.io/component={component}"

    def pods(self, component: str) -> list[Any]:
        """The pods of a component that are not being deleted."""
        pods = self.get("pods", self.selector(component))["items"]
        return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]

    def metric(self, pod: str, name: str) -> float:
        """A metric of an engine pod, summed over its labels; read inside the pod, which network policies allow."""
        page = self.kubectl("exec", pod, "--container=engine", "--", "python3", "-c", _READ_METRICS)
        return _value(name, page)

    def gateway_metric(self, name: str) -> float:
        """A metric of the gateways, summed over pods and labels; read through the API server, as `kubectl` does."""
        pods = [pod["metadata"]["name"] for pod in self.pods("gateway")]
        paths = [f"/api/v1/namespaces/{self.namespace}/pods/{pod}:8000/proxy/metrics" for pod in pods]
        return sum(_value(name, self.kubectl("get", "--raw", path)) for path in paths)

    def generated_tokens(self, pod: str) -> float:
        return self.metric(pod, "vllm:generation_tokens_total")

    def reset_prefix_caches(self) -> None:
        """Empty the prefix caches of all engines, by a gateway with `--enable-dev-endpoints`."""
        gateway = self.pods("gateway")[0]["metadata"]["name"]
        self.kubectl("exec", gateway, "--", "python3", "-c", _RESET_CACHES)

    def kill_at_next_work(self, pod: str, container: str) -> None:
        """Let the kernel kill the container's PID 1 (SIGKILL) as soon as it uses CPU time again."""
        self.kubectl("exec", pod, f"--container={container}", "--", "python", "-c", _KILL_AT_NEXT_WORK)

    def describe(self) -> str:
        """Pods, events and the last log lines of all containers."""
        selector = f"--selector=app.kubernetes.io/instance={self.name}"
        commands = (
            ["get", "pods", "--output=wide"],
            ["get", "events", "--sort-by=.lastTimestamp"],
            ["logs", selector, "--all-containers", "--prefix", "--tail=60"],
        )
        return "\n".join(self.kubectl(*command, check=False) for command in commands)

    def _helm_upgrade(self, values: dict[str, Any], files: Sequence[Path] = ()) -> list[str]:
        images = {"image__registry": self.registry, "engine__image__tag": self.tag, "gateway__image__tag": self.tag}
        pools: dict[str, Any] = {} if files or "engines" in values else {"engines__builtin": {}}
        settings = [
            f"--set={path.replace('__', '.')}={value}"
            if isinstance(value, str)
            else f"--set-json={path.replace('__', '.')}={json.dumps(value)}"
            for path, value in (images | pools | {"enginePool__env": [ONE_THREAD]} | values).items()
        ]
        settings = [*(f"--values={path}" for path in files), *settings]
        return ["helm", "upgrade", "--install", self.name, str(CHART), "--namespace", self.namespace, *settings]

    def _wait_for(self, *command: str, timeout: float) -> None:
        """Run a command that waits for pods. Reports changes of pods, warnings and image pulls while it runs.

        Raises AssertionError with the pods' last states if the command fails.
        """
        began = time.monotonic()
        progress = PodProgress(*self._pods_and_events())
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
            while True:
                try:
                    output, _ = process.communicate(timeout=_POLL_SECONDS)
                    break
                except subprocess.TimeoutExpired:
                    elapsed = time.monotonic() - began
                    for line in progress.update(*self._pods_and_events()):
                        self.report(f"{elapsed:6.0f} s  {line}")
                    if elapsed > timeout:
                        process.kill()
        if process.returncode != 0:
            progress.update(*self._pods_and_events())
            failure = f"{' '.join(command)} exited with {process.returncode}:\n{output}"
            raise AssertionError(f"{failure}\nLast state of the pods:\n{progress.summary()}")

    def _pods_and_events(self) -> tuple[list[Any], list[Any]]:
        events = self.get("events")["items"]
        notable = [event for event in events if event["type"] == "Warning" or event["reason"] == "Pulling"]
        return self.get("pods")["items"], notable

    @contextmanager
    def client(self) -> Iterator[OpenAI]:
        """The OpenAI client, without retries, through a port-forward to the gateway's Service."""
        with (
            self.forwarded(f"{self.name}-gateway", 80) as port,
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=60, max_retries=0) as client,
        ):
            yield client

    @contextmanager
    def forwarded(self, service: str, port: int) -> Iterator[int]:
        """A port of this machine that is forwarded to one of a Service."""
        command = ["kubectl", "--namespace", self.namespace, "port-forward", f"service/{service}", f":{port}"]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                match = re.search(r"127\.0\.0\.1:(\d+)", process.stdout.readline())
                assert match, "kubectl port-forward printed no port"
                yield int(match[1])
            finally:
                process.terminate()


def _value(name: str, page: str) -> float:
    """A metric of a Prometheus page, summed over the series that begin with `name`, which may have labels."""
    pattern = rf"^{re.escape(name)}(?:{{.*}})?\s+(\S+)"
    return sum(float(value) for value in re.findall(pattern, page, re.M))


def eventually(claim: str, check: Any, seconds: float = 120) -> Any:
    """Poll `check()` until it returns something true, and return that. Raises AssertionError after `seconds`."""
    deadline = time.monotonic() + seconds
    while not (result := check()):
        assert time.monotonic() < deadline, f"not within {seconds} s: {claim}"
        time.sleep(0.5)
    return result
