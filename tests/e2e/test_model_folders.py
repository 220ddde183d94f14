"""Models that the image runs by `transformers`: an encoder, and a causal language model without a module of its own."""

import base64
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from support.kube import Release
from support.tiny_models import make_tiny_model

ENCODER: dict[str, Any] = {"pad_token_id": 0, "max_position_embeddings": 160, "type_vocab_size": 2}


@pytest.fixture(scope="module", autouse=True)
def with_model_folders(release: Release, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "bert", "bert", auto_class="AutoModel", **ENCODER)
    make_tiny_model(folder / "starcoder2", "starcoder2")
    for name in ("bert", "starcoder2"):
        release.apply(config_map(name, folder / name))
    release.install(engines__bert=pool("bert"), engines__starcoder2=pool("starcoder2"))


def config_map(name: str, folder: Path) -> dict[str, Any]:
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in folder.iterdir()}
    return {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": name}, "binaryData": files}


def pool(name: str) -> dict[str, Any]:
    return {
        "model": "/model",
        "servedModelName": name,
        "volumes": [{"name": "folder", "configMap": {"name": name}}],
        "volumeMounts": [{"name": "folder", "mountPath": "/model", "readOnly": True}],
    }


@pytest.mark.smoke
def test_an_encoder_embeds_and_a_type_through_transformers_completes(client: OpenAI) -> None:
    assert {model.id for model in client.models.list()} == {"proa-builtin", "bert", "starcoder2"}
    [embedding] = client.embeddings.create(model="bert", input="hello").data
    assert len(embedding.embedding) == 64
    answer = client.completions.create(model="starcoder2", prompt="hello", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
