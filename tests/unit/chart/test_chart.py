"""What the chart renders, and what it refuses."""

import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).parents[3]
HELM = shutil.which("helm", path=str(ROOT / ".tools" / "bin")) or shutil.which("helm")
pytestmark = pytest.mark.skipif(HELM is None, reason="helm is not here")


def template(*settings: str) -> subprocess.CompletedProcess[str]:
    command = [str(HELM), "template", "proa", str(ROOT / "charts" / "proa"), "--namespace", "here"]
    flags = [f"--set={setting}" for setting in settings]
    return subprocess.run([*command, *flags], capture_output=True, text=True, check=False)


def render(*settings: str) -> dict[tuple[str, str], Any]:
    done = template(*settings)
    assert done.returncode == 0, done.stderr
    objects = [document for document in yaml.safe_load_all(done.stdout) if document]
    return {(document["kind"], document["metadata"]["name"]): document for document in objects}


def engine_pod(*settings: str, pool: str = "builtin") -> Any:
    return render(*settings)["Deployment", f"proa-engine-{pool}"]["spec"]["template"]["spec"]


SIDECAR = ("engines.builtin.tensorParallelSize=2", "engines.builtin.tensorParallel.mode=sidecar")


@pytest.mark.parametrize("version", ["1.30", "1.32", "1.35"])
@pytest.mark.parametrize("settings", [(), SIDECAR, ("image.pullSecrets={a}", "otel.OTEL_SDK_DISABLED=true")])
def test_every_object_is_valid_kubernetes(version: str, settings: tuple[str, ...]) -> None:
    for document in render(*settings).values():
        kubernetes_validate.validate(document, version, strict=True)


def test_defaults_serve_the_builtin_model_with_one_pod_each() -> None:
    objects = render()
    assert objects["Deployment", "proa-engine-builtin"]["spec"]["replicas"] == 1
    arguments = engine_pod()["containers"][0]["args"]
    assert "--model=builtin" in arguments
    assert "--tensor-parallel-size=1" in arguments
    gateway = objects["Deployment", "proa-gateway"]["spec"]["template"]["spec"]["containers"][0]
    assert "--engine-service=proa-engine.here:50051" in gateway["args"]


def test_every_container_is_confined() -> None:
    for key, document in render(*SIDECAR).items():
        if key[0] != "Deployment":
            continue
        pod = document["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod.get("initContainers", []):
            context = container["securityContext"]
            assert context["capabilities"] == {"drop": ["ALL"]}
            assert context["readOnlyRootFilesystem"]
            assert not context["allowPrivilegeEscalation"]


def test_role_reads_endpoint_slices_and_nothing_else() -> None:
    (rule,) = render()["Role", "proa-gateway"]["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }


def test_shared_memory_is_a_memory_volume_in_every_engine_container() -> None:
    pod = engine_pod(*SIDECAR)
    (shm,) = [volume for volume in pod["volumes"] if volume["name"] == "shm"]
    assert shm["emptyDir"]["medium"] == "Memory"
    for container in pod["containers"] + pod["initContainers"]:
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]


def test_sidecar_mode_makes_one_restartable_container_a_rank() -> None:
    pod = engine_pod("engines.builtin.model=org/big", *SIDECAR[1:], "engines.builtin.tensorParallelSize=4")
    assert [container["name"] for container in pod["initContainers"]] == [f"tp-worker-{rank}" for rank in (1, 2, 3)]
    assert all(container["restartPolicy"] == "Always" for container in pod["initContainers"])
    sockets = [argument for argument in pod["containers"][0]["args"] if argument.startswith("--worker-socket=")]
    assert sockets == [f"--worker-socket=/run/proa/rank-{rank}.sock" for rank in (1, 2, 3)]


def test_process_mode_makes_no_worker_container() -> None:
    pod = engine_pod("engines.builtin.model=org/big", "engines.builtin.tensorParallelSize=4")
    assert "initContainers" not in pod
    assert not any(argument.startswith("--worker-socket") for argument in pod["containers"][0]["args"])


def test_probes_ask_for_loaded_alive_and_ready_separately() -> None:
    engine = engine_pod()["containers"][0]
    assert engine["startupProbe"]["grpc"]["service"] == "startup"
    assert engine["livenessProbe"]["grpc"]["service"] == "liveness"
    assert "service" not in engine["readinessProbe"]["grpc"]


def test_pools_take_what_they_leave_out_from_the_pool_defaults() -> None:
    settings = ("engines.big.model=org/big", "engines.big.replicas=3", "enginePool.drainSeconds=100")
    objects = render(*settings)
    assert objects["Deployment", "proa-engine-big"]["spec"]["replicas"] == 3
    assert engine_pod(*settings, pool="big")["terminationGracePeriodSeconds"] == 115
    assert "--model=org/big" in engine_pod(*settings, pool="big")["containers"][0]["args"]


def test_otel_variables_reach_every_container() -> None:
    for document in render(*SIDECAR, "otel.OTEL_EXPORTER_OTLP_ENDPOINT=http://collector:4317").values():
        if document["kind"] == "Deployment":
            pod = document["spec"]["template"]["spec"]
            for container in pod["containers"] + pod.get("initContainers", []):
                names = {variable["name"] for variable in container["env"]}
                assert {"OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_SERVICE_NAME"} <= names


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        (("engines.builtin.replica=2",), "additional properties 'replica' not allowed"),
        (("engines.builtin.tensorParallel.mode=thread",), "value must be one of"),
        (("engines.builtin.tensorParallelSize=0",), "minimum"),
        (("gateway.port=70000",), "maximum"),
        (("otel.FOO=1",), "FOO"),
        (
            (*SIDECAR, r"engines.builtin.resources.limits.nvidia\.com/gpu=1"),
            "resources name nvidia.com/gpu; say gpu.allocation instead",
        ),
        (("engines.a-name-that-is-much-too-long.replicas=1",), "at most 20 characters"),
    ],
)
def test_a_wrong_value_is_refused_in_a_sentence(settings: tuple[str, ...], sentence: str) -> None:
    done = template(*settings)
    assert done.returncode != 0
    assert sentence in done.stderr
