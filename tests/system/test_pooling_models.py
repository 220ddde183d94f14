"""Scores and classes of tiny random models over HTTP equal those of transformers on the same texts."""

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from support.engine_server import serving_model
from support.gateway import RunningGateway, running_gateway
from support.tiny_models import make_tiny_model
from support.tokenizers import byte_level_tokenizer

QUERY, DOCUMENTS = "What is the fox?", ["The quick brown fox.", "one two three", "A lazy dog jumps over the line."]
PROMPT = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n<Instruct>: {instruction}\n'
    "<Query>: {query}\n<Document>: {document}<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
)
MODEL: dict[str, Any] = {"vocab_size": 480, "max_position_embeddings": 1024}


@pytest.fixture
def tokenizer() -> Tokenizer:
    """Ends texts and joins pairs with `<eos>`."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.post_processor = TemplateProcessing(
        single="$A <eos>", pair="$A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 0)]
    )
    return tokenizer


@asynccontextmanager
async def served(folder: Path, tokenizer: Tokenizer, name: str) -> AsyncIterator[RunningGateway]:
    tokenizer.save(str(folder / "tokenizer.json"))
    with serving_model(folder, name) as port:
        async with running_gateway(f"127.0.0.1:{port}") as gateway:
            yield gateway


@pytest.fixture(autouse=True)
def _without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


async def post(gateway: RunningGateway, path: str, **fields: Any) -> Any:
    response = await gateway.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_a_generative_reranker(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, "qwen3", **MODEL)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    yes_no = [tokenizer.token_to_id(word) for word in ("no", "yes")]
    expected = []
    for document in DOCUMENTS:
        text = PROMPT.format(instruction="Find foxes", query=QUERY, document=document)
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        expected.append(model(torch.tensor([ids])).logits[0, -1, yes_no].softmax(-1)[1].item())
    async with served(folder, tokenizer, "Qwen3-Reranker-Tiny") as gateway:
        body = await post(gateway, "/rerank", query=QUERY, documents=DOCUMENTS, instruction="Find foxes")
        scores = {each["index"]: each["relevance_score"] for each in body["results"]}
        assert [scores[index] for index in range(3)] == pytest.approx(expected, abs=1e-3)
        assert list(scores) == sorted(range(3), key=lambda index: -expected[index])


async def test_a_cross_encoder(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForSequenceClassification

    fields = {**MODEL, "auto_class": "AutoModelForSequenceClassification", "num_labels": 1}
    folder = make_tiny_model(tmp_path, "qwen3", **fields)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    ids = [tokenizer.encode(QUERY, document).ids for document in DOCUMENTS]
    logits = [model(torch.tensor([each])).logits.item() for each in ids]
    async with served(folder, tokenizer, "ranker") as gateway:
        for activation, expected in ((None, torch.tensor(logits).sigmoid().tolist()), (False, logits)):
            body = await post(gateway, "/score", text_1=QUERY, text_2=DOCUMENTS, use_activation=activation)
            assert [each["score"] for each in body["data"]] == pytest.approx(expected, abs=1e-4)
        assert body["usage"]["prompt_tokens"] == sum(map(len, ids))
        refused = await gateway.complete()
        assert refused.status_code in (400, 404)


async def test_an_encoder_that_tells_the_texts_of_a_pair_apart(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForSequenceClassification

    fields = {**MODEL, "auto_class": "AutoModelForSequenceClassification", "num_labels": 1, "type_vocab_size": 2}
    folder = make_tiny_model(tmp_path, "bert", pad_token_id=1, **fields)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    expected = []
    for document in DOCUMENTS:
        pair = tokenizer.encode(QUERY, document)
        inputs = {"input_ids": [pair.ids], "token_type_ids": [pair.type_ids], "attention_mask": [[1] * len(pair.ids)]}
        logits = model(**{name: torch.tensor(rows) for name, rows in inputs.items()}).logits
        expected.append(logits.sigmoid().item())
    async with served(folder, tokenizer, "encoder") as gateway:
        body = await post(gateway, "/rerank", query=QUERY, documents=DOCUMENTS)
        scores = {each["index"]: each["relevance_score"] for each in body["results"]}
        assert [scores[index] for index in range(3)] == pytest.approx(expected, abs=1e-4)


async def test_a_classifier(tmp_path: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoModelForSequenceClassification

    labels = {0: "calm", 1: "glad", 2: "sad"}
    fields = {**MODEL, "auto_class": "AutoModelForSequenceClassification", "id2label": labels}
    folder = make_tiny_model(tmp_path, "qwen3", **fields)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    rows = [model(torch.tensor([tokenizer.encode(text).ids])).logits[0].softmax(-1) for text in DOCUMENTS]
    async with served(folder, tokenizer, "moods") as gateway:
        body = await post(gateway, "/classify", input=DOCUMENTS)
        for entry, row in zip(body["data"], rows, strict=True):
            assert entry["probs"] == pytest.approx(row.tolist(), abs=1e-4)
            assert entry["label"] == labels[int(row.argmax())]
            assert entry["num_classes"] == 3
