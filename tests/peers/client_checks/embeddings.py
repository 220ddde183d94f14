"""Embeddings and ranked documents with the clients of OpenAI, LangChain, LiteLLM and Cohere."""

import math

import cohere
import litellm
from langchain_openai import OpenAIEmbeddings

from client_checks.openai_chat import client

TEXTS = ["What is the capital of France?", "The capital of France is Paris.", "Cats sleep all day."]


def check_openai(url: str, model: str) -> None:
    answer = client(url).embeddings.create(model=model, input=TEXTS)
    rows = [each.embedding for each in answer.data]
    numbers = client(url).embeddings.create(model=model, input=TEXTS, encoding_format="float")
    assert rows == [each.embedding for each in numbers.data]
    assert math.isclose(sum(value * value for value in rows[0]), 1, rel_tol=1e-4)
    assert answer.usage.prompt_tokens > len(TEXTS)
    assert cosine(rows[0], rows[1]) > cosine(rows[0], rows[2])


def check_langchain(url: str, model: str) -> None:
    embeddings = OpenAIEmbeddings(
        base_url=f"{url}/v1", model=model, api_key="none", max_retries=0, check_embedding_ctx_length=False
    )
    rows = embeddings.embed_documents(TEXTS)
    assert rows[0] == embeddings.embed_query(TEXTS[0])
    assert cosine(rows[0], rows[1]) > cosine(rows[0], rows[2])


def check_litellm(url: str, model: str) -> None:
    answer = litellm.embedding(model=f"hosted_vllm/{model}", api_base=f"{url}/v1", input=TEXTS)
    assert len(answer.data) == len(TEXTS)
    ranked = litellm.rerank(
        model=f"hosted_vllm/{model}", api_base=url, api_key="none", query=TEXTS[0], documents=TEXTS[1:], top_n=1
    )
    assert [each["index"] for each in ranked.results] == [0]


def check_cohere(url: str, model: str) -> None:
    ranked = cohere.ClientV2("none", base_url=url).rerank(model=model, query=TEXTS[0], documents=TEXTS[1:])
    assert [each.index for each in ranked.results] == [0, 1]
    assert ranked.results[0].relevance_score > ranked.results[1].relevance_score


def cosine(first: list[float], second: list[float]) -> float:
    """Of vectors of length 1."""
    return sum(one * other for one, other in zip(first, second, strict=True))
