"""The state of a namespace's pods as lines of text, and which lines are new since the last update."""

from typing import Any


class PodProgress:
    """`update()` returns changed pod states and new events; `summary()` the last states and all events."""

    def __init__(self, pods: list[Any], events: list[Any]) -> None:
        """`events` are old: they are not reported."""
        self._states = {pod["metadata"]["name"]: pod_state(pod) for pod in pods}
        self._old = {_text(event) for event in events}
        self._events: list[str] = []

    def update(self, pods: list[Any], events: list[Any]) -> list[str]:
        states = {pod["metadata"]["name"]: pod_state(pod) for pod in pods}
        changed = [f"pod {name}: {state}" for name, state in states.items() if self._states.get(name) != state]
        gone = [f"pod {name}: deleted" for name in self._states.keys() - states.keys()]
        new = [text for text in dict.fromkeys(_text(event) for event in events) if text not in self._old]
        self._states = states
        self._old.update(new)
        self._events += new
        return changed + gone + new

    def summary(self) -> str:
        return "\n".join([*(f"pod {name}: {state}" for name, state in self._states.items()), *self._events])


def pod_state(pod: Any) -> str:
    """The phase, then the state of each container, or why there are no containers yet."""
    status = pod["status"]
    containers = status.get("initContainerStatuses", []) + status.get("containerStatuses", [])
    details = [_container_state(container) for container in containers] or [
        f"{condition.get('reason', condition['type'])}: {condition['message']}"
        for condition in status.get("conditions", [])
        if condition["status"] == "False" and "message" in condition
    ]
    phase = "Terminating" if "deletionTimestamp" in pod["metadata"] else status["phase"]
    return "; ".join([phase, *details])


def _container_state(status: Any) -> str:
    state: dict[str, Any] = status["state"] or {"waiting": {}}
    ((kind, detail),) = state.items()
    if kind == "running":
        kind = "ready" if status["ready"] else "running, not ready"
    words = [f"{status['name']} {kind}", detail.get("reason"), detail.get("message")]
    restarts = [f"restarted {status['restartCount']} times"] if status["restartCount"] else []
    exit_code = [f"exit code {detail['exitCode']}"] if "exitCode" in detail else []
    return ", ".join([": ".join(word for word in words if word), *exit_code, *restarts])


def _text(event: Any) -> str:
    of = event["involvedObject"]
    return f"{of['kind'].lower()} {of['name']}: {event['reason']}: {event['message']}"
