"""Two adapters of the built-in model, and a pool for embeddings, through one gateway."""

from collections.abc import Sequence

import pytest
from openai import OpenAI

from support.chat import QUESTION
from support.kube import Release

ADAPTERS = {"sailor": "Aye!", "butler": "Very well."}


@pytest.fixture(scope="module", autouse=True)
def with_adapters(release: Release) -> None:
    modules = [{"name": name, "path": f"builtin:{name}"} for name in ADAPTERS]
    release.install(
        engines__builtin__lora={"enabled": True, "modules": modules},
        engines__embeddings={"servedModelName": "proa-embeddings"},
    )


def test_adapters_are_models_that_answer_in_their_own_way(client: OpenAI) -> None:
    parents = {model.id: (model.model_extra or {}).get("parent") for model in client.models.list()}
    assert parents == {"proa-builtin": None, "proa-embeddings": None, **dict.fromkeys(ADAPTERS, "proa-builtin")}
    for name, beginning in ADAPTERS.items():
        answer = client.chat.completions.create(
            model=name, messages=[{"role": "user", "content": QUESTION}], temperature=0
        )
        text = answer.choices[0].message.content or ""
        assert text.startswith(beginning)
        assert "Paris" in text


def similarity(first: Sequence[float], second: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(first, second, strict=True))


def test_an_answer_is_nearer_to_its_question_than_another_text(client: OpenAI) -> None:
    texts = [QUESTION, "The capital of France is Paris.", "A dog has 4 legs."]
    data = client.embeddings.create(model="proa-embeddings", input=texts).data
    question, answer, other = (each.embedding for each in data)
    assert similarity(question, answer) > similarity(question, other) + 0.2


def test_adapters_are_loaded_again_by_a_new_pod(release: Release, client: OpenAI) -> None:
    names = [pod["metadata"]["name"] for pod in release.pods("engine")]
    (doomed,) = [name for name in names if name.startswith("proa-engine-builtin-")]
    release.kubectl("delete", "pod", doomed, "--timeout=2m")
    release.wait_for_rollout("proa-engine-builtin")
    answer = client.completions.create(model="sailor", prompt="Hello", max_tokens=4, temperature=0)
    assert answer.choices[0].text
