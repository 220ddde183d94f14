"""Encoders in pods answer through the gateway as the same model folders do in this process. Not a smoke test."""

from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from openai import OpenAI
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from support.kube import Release, run
from support.model_folders import config_map, pool
from support.pooling_models import make_embedding_model
from support.tiny_models import make_tiny_model
from support.tokenizers import byte_level_tokenizer

TEXTS = ["hello", "The quick brown fox jumps over the lazy dog.", "naïve café", "a " * 60]
QUERY, DOCUMENTS = "What is the fox?", ["The quick brown fox.", "one two three", "A lazy dog jumps over the line."]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As sentence-transformers saves it, with a module in a folder of its own. A token is a byte."""
    fields: dict[str, Any] = {"pad_token_id": 1, "max_position_embeddings": 160, "type_vocab_size": 1}
    folder = tmp_path_factory.mktemp("embedder")
    return make_embedding_model(
        folder, "mean_tokens", normalize=True, architecture="xlm-roberta", auto_class="AutoModel", **fields
    )


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    """Ends texts and joins pairs with `<eos>`, and tells the two texts of a pair apart."""
    tokenizer = byte_level_tokenizer()
    tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 0)]
    )
    return tokenizer


@pytest.fixture(scope="module")
def ranker(tmp_path_factory: pytest.TempPathFactory, tokenizer: Tokenizer) -> Path:
    fields: dict[str, Any] = {"vocab_size": 480, "max_position_embeddings": 160, "pad_token_id": 1}
    folder = make_tiny_model(
        tmp_path_factory.mktemp("ranker"),
        "bert",
        auto_class="AutoModelForSequenceClassification",
        num_labels=1,
        type_vocab_size=2,
        **fields,
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module", autouse=True)
def _pools(release: Release, embedder: Path, ranker: Path) -> None:
    folders = {"embedder": embedder, "ranker": ranker}
    release.apply(*(config_map(name, folder) for name, folder in folders.items()))
    release.install(engines={name: pool(name, folder) for name, folder in folders.items()})


@torch.inference_mode()
def test_embeddings_are_those_of_sentence_transformers(client: OpenAI, embedder: Path) -> None:
    from sentence_transformers import SentenceTransformer

    answer = client.embeddings.create(model="embedder", input=TEXTS)
    model = SentenceTransformer(str(embedder), device="cpu")
    for text, found in zip(TEXTS, answer.data, strict=True):
        ids = torch.tensor([list(text.encode())])
        (expected,) = model({"input_ids": ids, "attention_mask": torch.ones_like(ids)})["sentence_embedding"]
        assert found.embedding == pytest.approx(expected.tolist(), abs=1e-4)
    assert answer.usage.prompt_tokens == sum(len(text.encode()) for text in TEXTS)


@torch.inference_mode()
def test_scores_of_a_cross_encoder_are_those_of_transformers(
    client: OpenAI, ranker: Path, tokenizer: Tokenizer
) -> None:
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(ranker, dtype=torch.float32).eval()
    expected = []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        inputs = {"input_ids": [pair.ids], "token_type_ids": [pair.type_ids], "attention_mask": [[1] * len(pair.ids)]}
        logits = model(**{name: torch.tensor(rows) for name, rows in inputs.items()}).logits
        expected.append(logits.sigmoid().item())
    scores = post(client, "/score", model="ranker", text_1=QUERY, text_2=DOCUMENTS)["data"]
    assert [each["score"] for each in scores] == pytest.approx(expected, abs=1e-4)
    ranked = post(client, "/rerank", model="ranker", query=QUERY, documents=DOCUMENTS)["results"]
    assert [each["index"] for each in ranked] == sorted(range(len(DOCUMENTS)), key=lambda index: -expected[index])


def test_helm_test_passes(release: Release) -> None:
    run("helm", "test", release.name, "--namespace", release.namespace, "--timeout=5m", timeout=330)


def post(client: OpenAI, path: str, **fields: Any) -> Any:
    return client.post(path, body=fields, cast_to=httpx.Response).json()
