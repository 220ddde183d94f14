"""Embeddings of a real model over HTTP are those of sentence-transformers."""

import torch
from openai import OpenAI

from support import real_texts
from support.processes import engine_process, gateway_process
from support.real_model import EMBEDDER, Record

TEXTS = [
    *(*real_texts.QUESTIONS, *real_texts.CONTINUATIONS, *real_texts.CODE, *real_texts.UNICODE),
    *real_texts.DOCUMENTS.values(),
]


def test_embeddings_are_those_of_sentence_transformers(record: Record) -> None:
    from sentence_transformers import SentenceTransformer

    with engine_process(f"--model={EMBEDDER}", seconds=600) as (_, address), gateway_process(address) as (_, port):
        client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", timeout=600)
        together = client.embeddings.create(model=str(EMBEDDER), input=TEXTS).data
        alone = [client.embeddings.create(model=str(EMBEDDER), input=text).data[0] for text in TEXTS]
    ours, single = (torch.tensor([each.embedding for each in found]) for found in (together, alone))
    torch.testing.assert_close(single, ours, rtol=0, atol=1e-6)
    expected = torch.from_numpy(SentenceTransformer(str(EMBEDDER), device="cpu").encode(TEXTS))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-6)
    worst = (ours - expected).abs().max()
    record("embeddings of all-MiniLM-L6-v2, alone and together", f"{len(TEXTS)} texts within {worst:.0e}")
