"""Conversations that are larger than the caches of two engines, while one engine drains and a gateway is killed."""

from collections.abc import Callable
from dataclasses import dataclass

from support.kube import Release, eventually
from support.span_receiver import Span, span_receiver
from support.traffic import Answer, Texts, Traffic, traffic

NUM_CLIENTS = 24
CONVERSATIONS = (
    *(f"--clients={NUM_CLIENTS}", "--requests=16", "--conversation", "--items=3", "--max-tokens=16"),
    "--timeout=180",
)
# 600 blocks of 16 tokens: about half of what 12 conversations have at the end.
POOL = {"replicas": 2, "extraArgs": ["--num-gpu-blocks-override=600"]}


@dataclass(frozen=True, slots=True)
class Outcome:
    """`cached`: share of the later turns' prompts."""

    texts: Texts
    cached: float


def converse(release: Release, endpoint: str, num_gateways: int, disturb: Callable[[Traffic], None]) -> Outcome:
    """All conversations through new gateways. Leaves empty caches. Raises AssertionError if a request failed."""
    release.install(
        engines__builtin=POOL,
        gateway__replicas=num_gateways,
        gateway__podAnnotations__run=f"of {num_gateways}",
        gateway__sessionAdmission__mode="wait",
        gateway__extraArgs=["--enable-dev-endpoints"],
        otel__OTEL_EXPORTER_OTLP_ENDPOINT=endpoint,
    )
    with traffic(release, *CONVERSATIONS) as running:
        running.wait_for(NUM_CLIENTS)
        disturb(running)
        outcome = Outcome(running.texts(), cached_share(running.answers()))
    release.reset_prefix_caches()
    return outcome


def cached_share(answers: list[Answer]) -> float:
    later = [answer for answer in answers if answer.index]
    return sum(answer.cached_tokens for answer in later) / sum(answer.prompt_tokens for answer in later)


def test_two_gateways_keep_what_one_keeps_though_one_of_them_is_killed(release: Release) -> None:
    def drain(running: Traffic) -> None:
        release.kubectl("delete", "pod", release.pods("engine")[0]["metadata"]["name"], "--wait=false")

    def drain_and_kill(running: Traffic) -> None:
        drain(running)
        running.wait_for(NUM_CLIENTS)
        release.kill_at_next_work(release.pods("gateway")[0]["metadata"]["name"], "gateway")

    with span_receiver(release) as (endpoint, spans):

        def waits() -> list[Span]:
            """Of turns that waited for a place and got one."""
            return [span for span in spans() if span.attributes.get("proa.session.outcome") == "waited"]

        one = converse(release, endpoint, 1, drain)
        num_waits = len(eventually("spans of waits have been received", waits))
        two = converse(release, endpoint, 2, drain_and_kill)
        release.report(f"cached: {one.cached:.3f} with one gateway, {two.cached:.3f} with two")
        eventually("more spans of waits have been received", lambda: len(waits()) > num_waits)
        assert {span.name for span in waits()} == {"admission"}
    assert any(pod["status"]["containerStatuses"][0]["restartCount"] for pod in release.pods("gateway"))
    assert two.texts == one.texts
    assert two.cached > one.cached - 0.05
