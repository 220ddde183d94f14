"""A long prompt that the device has evicted comes back from host memory, from disk, and after a restart."""

from openai import OpenAI, OpenAIError

from support.kube import Release, eventually

HOST_CACHE = {
    "hostCache": {"sizeGb": 0.25},
    "extraArgs": ["--num-gpu-blocks-override=140"],  # of 16 tokens: one request of the context's 2,048 and little more
}
PROMPT = " ".join(f"Item {number} costs {number * 7 % 50} coins." for number in range(110))


def cached_tokens(client: OpenAI, prompt: str) -> int:
    answer = client.completions.create(model="proa-builtin", prompt=prompt, max_tokens=1, temperature=0)
    assert answer.usage is not None
    details = answer.usage.prompt_tokens_details
    return (details.cached_tokens or 0) if details is not None else 0


def evict(client: OpenAI) -> None:
    """Fill the device with other prompts."""
    for number in range(3):
        cached_tokens(client, f"Another list {number}. {PROMPT}")


def pod_name(release: Release) -> str:
    (pod,) = release.pods("engine")
    return str(pod["metadata"]["name"])


def restart(release: Release, client: OpenAI) -> None:
    """Kill the engine's container and wait until requests are served by the one that replaces it in the same pod."""
    pod = pod_name(release)
    release.kill_at_next_work(pod, "engine")

    def is_restarted() -> bool:
        status = release.get("pod", pod)["status"]["containerStatuses"][0]
        return status["restartCount"] == 1 and bool(status["ready"])

    eventually("the container is restarted", is_restarted)

    def answers() -> bool:
        try:
            client.completions.create(model="proa-builtin", prompt="Hello", max_tokens=1)
        except OpenAIError:
            return False
        return True

    eventually("the engine answers", answers)
    assert pod_name(release) == pod


def test_an_evicted_prompt_is_loaded_from_host_memory(release: Release, client: OpenAI) -> None:
    release.install(engines__builtin=HOST_CACHE)
    pod = pod_name(release)
    assert cached_tokens(client, PROMPT) == 0
    evict(client)
    assert release.metric(pod, "vllm:external_prefix_cache_hits_total") == 0
    assert cached_tokens(client, PROMPT) > 1000
    assert release.metric(pod, "vllm:external_prefix_cache_hits_total") > 1000


def test_a_restarted_engine_has_the_blocks_of_its_predecessor(release: Release, client: OpenAI) -> None:
    release.install(engines__builtin={**HOST_CACHE, "hostCache": {"sizeGb": 0.25, "survivesRestart": True}})
    assert cached_tokens(client, PROMPT) == 0
    restart(release, client)
    assert cached_tokens(client, PROMPT) > 1000


def test_blocks_on_disk_survive_a_restart(release: Release, client: OpenAI) -> None:
    release.install(engines__builtin={**HOST_CACHE, "diskCache": {"sizeGb": 0.5}})
    assert cached_tokens(client, PROMPT) == 0
    evict(client)
    assert cached_tokens(client, PROMPT) > 1000  # blocks that were read are written to disk
    restart(release, client)
    assert cached_tokens(client, PROMPT) > 1000
