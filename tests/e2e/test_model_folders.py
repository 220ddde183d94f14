"""Models that the image runs by `transformers`: an encoder, and a causal language model without a module of its own."""

from typing import Any

import pytest
from openai import OpenAI

from support.kube import Release, eventually
from support.model_folders import config_map, pool
from support.tiny_models import make_tiny_model

ENCODER: dict[str, Any] = {"pad_token_id": 0, "max_position_embeddings": 160, "type_vocab_size": 2}


@pytest.fixture(scope="module", autouse=True)
def with_model_folders(release: Release, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "bert", "bert", auto_class="AutoModel", **ENCODER)
    make_tiny_model(folder / "starcoder2", "starcoder2")
    for name in ("bert", "starcoder2"):
        release.apply(config_map(name, folder / name))
    bert, starcoder2 = (pool(name, folder / name) for name in ("bert", "starcoder2"))
    release.install(engines__bert=bert, engines__starcoder2=starcoder2)


@pytest.mark.smoke
def test_an_encoder_embeds_and_a_type_through_transformers_completes(client: OpenAI) -> None:
    names = {"proa-builtin", "bert", "starcoder2"}
    eventually("the gateway has found all engines", lambda: {model.id for model in client.models.list()} == names)
    [embedding] = client.embeddings.create(model="bert", input="hello").data
    assert len(embedding.embedding) == 64
    answer = client.completions.create(model="starcoder2", prompt="hello", max_tokens=4, temperature=0)
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 4
