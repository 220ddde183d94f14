"""A long prompt that the device has evicted comes back from host memory."""

import pytest
from openai import OpenAI

from support.kube import Release

NUM_BLOCKS = 140  # of 16 tokens: one request of the context's 2,048 and little more
PROMPT = " ".join(f"Item {number} costs {number * 7 % 50} coins." for number in range(110))


@pytest.fixture(scope="module", autouse=True)
def with_host_cache(release: Release) -> None:
    release.install(
        engines__builtin={"hostCache": {"sizeGb": 0.25}, "extraArgs": [f"--num-gpu-blocks-override={NUM_BLOCKS}"]}
    )


def cached_tokens(client: OpenAI, prompt: str) -> int:
    answer = client.completions.create(model="proa-builtin", prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def test_an_evicted_prompt_is_loaded_from_host_memory(release: Release, client: OpenAI) -> None:
    (pod,) = [each["metadata"]["name"] for each in release.pods("engine")]
    assert cached_tokens(client, PROMPT) == 0
    for number in range(3):
        cached_tokens(client, f"Another list {number}. {PROMPT}")
    assert release.metric(pod, "vllm:external_prefix_cache_hits_total") == 0
    assert cached_tokens(client, PROMPT) > 1000
    assert release.metric(pod, "vllm:external_prefix_cache_hits_total") > 1000
