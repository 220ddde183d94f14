"""The commands in the chart's notes, and the requests of `helm test`."""

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

import pytest

from support.chart import CHART, GATEWAY_POD, HELM, lookup, needs_helm, render

pytestmark = needs_helm


def notes(*settings: str) -> str:
    flags = [f"--set={setting}" for setting in settings]
    command = [str(HELM), "install", "sea", str(CHART), "--namespace=here", "--dry-run=client", *flags]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return done.stdout.partition("NOTES:")[2]


def test_the_notes_show_a_request_to_each_model() -> None:
    text = notes("engines.builtin.replicas=1", "engines.big.model=org/big", "gateway.service.port=81")
    assert "kubectl --namespace here port-forward service/sea-proa-gateway 8000:81" in text
    assert '{"model": "proa-builtin"' in text
    assert '{"model": "org/big"' in text
    assert "helm test sea --namespace here" in text
    assert "Authorization" not in text


def test_the_notes_say_when_the_builtin_pool_ends() -> None:
    sentence = "the pool `builtin`, which serves the built-in model as long as `engines` names no pool. Wait for it:"
    assert sentence in notes()
    assert "is starting. Wait for it:" in notes("engines.big.model=org/big")


def test_the_notes_show_the_api_key_header_if_one_is_needed() -> None:
    assert '--header "Authorization: Bearer $KEY" \\\n' in notes("gateway.apiKeys.existingSecret=keys")


def test_the_notes_warn_if_blocks_travel_in_plaintext() -> None:
    exchange = ("image.registry=here", "enginePool.hostCache.sizeGb=1", "enginePool.kvTransfer.enabled=true")
    assert "WARNING: engines exchange KV cache blocks in plaintext" in notes(*exchange)
    assert "WARNING" not in notes(*exchange, "tls.existingSecret=certs")


def test_the_notes_show_one_request_for_the_pools_of_a_model() -> None:
    assert notes("engines.one.replicas=1", "engines.two.replicas=1").count('"model": "proa-builtin"') == 1


def test_the_notes_warn_if_no_registry_is_set() -> None:
    assert "--set image.registry=REGISTRY --set gateway.image.tag=TAG --set engine.image.tag=TAG" in notes()
    assert "WARNING" not in notes("image.registry=here")
    assert "WARNING" not in notes("gateway.image.repository=there/proa-gateway")


def test_helm_test_mounts_only_the_api_keys() -> None:
    pod = lookup(render({"gateway.apiKeys.existingSecret": "keys"}), "Pod", "proa-test-builtin", "spec")
    assert [volume["secret"] for volume in pod["volumes"]] == [
        {"secretName": "keys", "items": [{"key": "keys.json", "path": "keys.json"}]}
    ]
    assert "env" not in pod["containers"][0]
    assert "volumes" not in lookup(render(), "Pod", "proa-test-builtin", "spec")


def test_helm_test_is_scheduled_like_the_gateway() -> None:
    values = {"gateway.nodeSelector": {"disk": "fast"}, "gateway.tolerations": [{"operator": "Exists"}]}
    objects = render({**values, "image.pullSecrets": ["login"]})
    tester, gateway = lookup(objects, "Pod", "proa-test-builtin", "spec"), lookup(objects, *GATEWAY_POD)
    for key in ("nodeSelector", "tolerations", "imagePullSecrets"):
        assert tester[key] == gateway[key]
    assert tester["containers"][0]["resources"] == gateway["containers"][0]["resources"]


class FakeGateway(BaseHTTPRequestHandler):
    """Records the path and the Authorization header of every request. Answers with 200, on `refused` paths with 400."""

    requests: list[tuple[str, str | None]]
    refused: dict[str, str]  # path -> code of the error

    def do_GET(self) -> None:
        self.requests.append((self.path, self.headers["Authorization"]))
        code = self.refused.get(self.path)
        self.send_response(400 if code else 200)
        self.end_headers()
        self.wfile.write(json.dumps({"error": {"code": code}} if code else {"usage": {"total_tokens": 1}}).encode())

    do_POST = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def fake_gateway(refused: dict[str, str]) -> Iterator[tuple[str, list[tuple[str, str | None]]]]:
    requests: list[tuple[str, str | None]] = []
    handler = type("Handler", (FakeGateway,), {"requests": requests, "refused": refused})
    with HTTPServer(("127.0.0.1", 0), handler) as server:
        thread = Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", requests
        finally:
            server.shutdown()
            thread.join()


def helm_test(url: str, keys: str = "/no/keys.json") -> subprocess.CompletedProcess[str]:
    """Run the script of the test pod for the model `m`."""
    script = lookup(render(), "Pod", "proa-test-builtin", "spec", "containers", 0, "args", 0)
    command = [sys.executable, "-c", script.replace("/etc/proa/keys/keys.json", keys), url, "m"]
    return subprocess.run(command, check=False, capture_output=True, text=True)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        (None, ("/v1/completions", None)),
        ({"name": "a", "key": "sesame"}, ("/v1/completions", "Bearer sesame")),
        ({"name": "a", "sha256": "0" * 64}, ("/ready", None)),
    ],
)
def test_helm_test_asks_for_text_or_checks_readiness_if_it_has_no_key(
    key: dict[str, str] | None, expected: tuple[str, str | None], tmp_path: Path
) -> None:
    keys = tmp_path / "keys.json"
    if key:
        keys.write_text(json.dumps({"keys": [key]}))
    with fake_gateway(refused={}) as (url, requests):
        assert helm_test(url, str(keys)).returncode == 0
    assert requests == [expected]


def test_helm_test_asks_models_without_text_for_values() -> None:
    with fake_gateway(refused={"/v1/completions": "unsupported_task"}) as (url, requests):
        assert helm_test(url).returncode == 0
    assert [path for path, _ in requests] == ["/v1/completions", "/pooling"]


def test_helm_test_fails_with_the_gateways_error() -> None:
    with fake_gateway(refused={"/v1/completions": "engine_lost"}) as (url, requests):
        done = helm_test(url)
    assert done.returncode == 1
    assert '/v1/completions: HTTP Error 400: Bad Request: {"error": {"code": "engine_lost"}}' in done.stderr
    assert len(requests) == 1


def test_helm_test_sends_a_request_to_every_pools_model() -> None:
    objects = render({"engines": {"builtin": {}, "big": {"model": "org/big"}}})
    models = {document["spec"]["containers"][0]["args"][-1] for (kind, _), document in objects.items() if kind == "Pod"}
    assert models == {"proa-builtin", "org/big"}
