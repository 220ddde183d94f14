"""Each way in which a download from the hub fails has a sentence of its own, and a misspelt folder a hint."""

import threading
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import huggingface_hub.constants
import pytest

from proa_engine.sources.resolve import resolve_model
from support.processes import free_port


class FakeHub(BaseHTTPRequestHandler):
    """Answers all requests with `status` and `headers`."""

    status = 404
    headers_sent: Mapping[str, str] = {}

    def do_GET(self) -> None:
        self.send_response(self.status)
        for name, value in self.headers_sent.items():
            self.send_header(name, value)
        self.send_header("Content-Length", "0")
        self.end_headers()

    do_HEAD = do_GET

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[FakeHub]]:
    handler = type("Handler", (FakeHub,), {})
    server = HTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    yield handler
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(
    ("status", "headers", "sentence"),
    [
        (
            404,
            {"X-Error-Code": "RepoNotFound"},
            "org/model is neither a folder here nor on the hub; a private one",
        ),
        (401, {"X-Error-Code": "GatedRepo"}, "org/model is gated: accept its terms on the hub, and set HF_TOKEN"),
        (403, {"X-Error-Code": "GatedRepo"}, "org/model is gated: accept its terms on the hub, and set HF_TOKEN"),
        (404, {"X-Error-Code": "RevisionNotFound"}, "org/model has no revision v2 on the hub"),
        (401, {}, "org/model could not be downloaded: the hub refuses the token in HF_TOKEN"),
        (403, {}, "org/model could not be downloaded: the hub refuses the token in HF_TOKEN"),
        (
            500,
            {},
            "could not be downloaded from the hub; give a folder, or check the network and HF_HUB_OFFLINE: Serv",
        ),
    ],
)
def test_an_answer_of_the_hub_is_one_sentence(
    status: int, headers: Mapping[str, str], sentence: str, hub: type[FakeHub]
) -> None:
    hub.status, hub.headers_sent = status, headers

    with pytest.raises(ValueError, match=sentence) as raised:
        resolve_model("org/model", "v2")

    assert "\n" not in str(raised.value)


def test_a_hub_that_cannot_be_reached_is_told_from_a_model_that_it_does_not_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "ENDPOINT", f"http://127.0.0.1:{free_port()}")

    with pytest.raises(ValueError, match=r"check the network and HF_HUB_OFFLINE: .*Connection refused"):
        resolve_model("org/model")


def test_a_misspelt_folder_is_not_only_looked_for_on_the_hub(
    hub: type[FakeHub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.headers_sent = {"X-Error-Code": "RepoNotFound"}
    (tmp_path / "models" / "llama-8b").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ValueError, match=r"neither a folder here \(did you mean the folder models/llama-8b\?\)"):
        resolve_model("models/lama-8b")
