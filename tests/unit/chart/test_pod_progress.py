"""What the end-to-end tests print about pods that they wait for."""

from typing import Any

from support.pod_progress import PodProgress, pod_state

FAILED_PULL = {"involvedObject": {"kind": "Pod", "name": "engine-1"}, "reason": "Failed", "message": "not found"}


def pod(phase: str, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": "engine-1"}, "status": {"phase": phase, **status}}


def container(state: dict[str, Any], ready: bool = False, restarts: int = 0) -> dict[str, Any]:
    return {"name": "engine", "state": state, "ready": ready, "restartCount": restarts}


def test_a_pod_without_containers_says_why() -> None:
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/2 nodes are free"}
    assert pod_state(pod("Pending", conditions=[condition])) == "Pending; Unschedulable: 0/2 nodes are free"


def test_a_container_is_described_by_its_state() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "Back-off"}}
    ended = {"terminated": {"reason": "Error", "exitCode": 3}}
    for status, text in (
        (container(waiting), "engine waiting: ImagePullBackOff: Back-off"),
        (container({"running": {}}), "engine running, not ready"),
        (container({"running": {}}, ready=True, restarts=2), "engine ready, restarted 2 times"),
        (container(ended), "engine terminated: Error, exit code 3"),
    ):
        assert pod_state(pod("Running", containerStatuses=[status])) == f"Running; {text}"


def test_only_changes_and_new_warnings_are_reported() -> None:
    progress = PodProgress([], [])
    assert progress.update([pod("Pending")], [FAILED_PULL]) == [
        "pod engine-1: Pending",
        "pod engine-1: Failed: not found",
    ]
    assert progress.update([pod("Pending")], [FAILED_PULL]) == []
    assert progress.update([pod("Running")], [FAILED_PULL]) == ["pod engine-1: Running"]
    assert progress.summary() == "pod engine-1: Running\npod engine-1: Failed: not found"
    assert progress.update([], []) == ["pod engine-1: deleted"]
    assert PodProgress([], [FAILED_PULL]).update([], [FAILED_PULL]) == []
