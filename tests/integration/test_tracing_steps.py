"""Step spans from a real core, received over OTLP: links, attributes, and when there are none."""

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from proa.contract import EngineCoreRequest, EventType
from proa_engine.observability.telemetry import make_engine_tracer
from support.core import CoreRun, make_request
from support.fake_executor import FakeExecutor
from support.fake_grammar import fake_grammar
from support.otlp import OtlpReceiver, ReceivedSpan

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class TracedRun:
    """A core whose requests and steps are traced; `shutdown` sends everything."""

    def __init__(self, **choices: Any) -> None:
        self.tracer = make_engine_tracer("m")
        self.run = CoreRun(trace_steps=self.tracer.trace_steps, clock=time.time, **choices)

    def submit(self, request: EngineCoreRequest, *, sampled: bool) -> None:
        request = replace(request, trace_headers={"traceparent": PARENT[:-2] + ("01" if sampled else "00")})
        self.run.submit(replace(request, trace_headers=self.tracer.start_request(request)))

    def finish(self) -> None:
        self.run.finish()
        for outputs in self.run.outputs.values():
            self.tracer.observe_outputs(outputs)
        self.tracer.shutdown()


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        yield receiver


def named(receiver: OtlpReceiver, name: str) -> list[ReceivedSpan]:
    return sorted((span for span in receiver.spans if span.name == name), key=lambda span: span.start)


def by_request(receiver: OtlpReceiver) -> dict[str, str]:
    """Request id -> id of its engine span."""
    return {span.attributes["proa.request.id"]: span.span_id for span in named(receiver, "llm_request")}


def test_a_traced_step_is_sampled_under_its_masks(receiver: OtlpReceiver) -> None:
    traced = TracedRun()
    constrained = make_request("a", range(5), grammar=fake_grammar(length=6))
    traced.submit(constrained, sampled=True)
    traced.finish()
    traced.run.assert_complete([constrained])
    assert len(named(receiver, "step")) >= 6


def test_each_step_of_a_sampled_request_links_to_it_and_has_no_parent(receiver: OtlpReceiver) -> None:
    traced = TracedRun()
    traced.submit(make_request("a", range(5), max_tokens=4), sampled=True)
    traced.finish()
    steps = named(receiver, "step")
    assert len(steps) == 4
    assert [span.links for span in steps] == [[by_request(receiver)["a"]]] * 4
    assert [span.attributes["proa.step.tokens"] for span in steps] == [5, 1, 1, 1]
    assert all(span.parent_id == "" and span.trace_id != PARENT[3:35] for span in steps)
    assert all(span.end >= span.start for span in steps)


def test_a_step_counts_all_requests_and_links_to_the_sampled_ones(receiver: OtlpReceiver) -> None:
    traced = TracedRun()
    for name in "abc":
        traced.submit(make_request(name, range(3), max_tokens=3), sampled=name != "b")
    traced.finish()
    spans = by_request(receiver)
    for step in named(receiver, "step"):
        assert sorted(step.links) == sorted([spans["a"], spans["c"]])
        assert step.attributes["proa.step.running_requests"] == 3


def test_steps_without_a_sampled_request_have_no_span(receiver: OtlpReceiver) -> None:
    traced = TracedRun()
    traced.submit(make_request("short", range(3), max_tokens=2), sampled=True)
    traced.submit(make_request("long", range(3), max_tokens=20), sampled=False)
    traced.finish()
    assert len(named(receiver, "step")) == 2
    assert len(traced.run.batches()) == 20


def test_prefill_counts_its_chunks_but_not_decode_steps(receiver: OtlpReceiver) -> None:
    traced = TracedRun(max_num_batched_tokens=8)
    traced.submit(make_request("a", range(20), max_tokens=6), sampled=True)
    traced.finish()
    (prefill,) = named(receiver, "prefill")
    assert prefill.attributes["proa.prefill.chunks"] == 3
    assert prefill.attributes["gen_ai.usage.cache_read.input_tokens"] == 0


def test_recomputing_after_preemption_does_not_count_as_a_prefill_chunk(receiver: OtlpReceiver) -> None:
    traced = TracedRun(num_blocks=10)
    traced.submit(make_request("first", range(12), max_tokens=24), sampled=False)
    traced.submit(make_request("last", range(20, 32), max_tokens=24), sampled=True)
    traced.finish()
    assert EventType.PREEMPTED in traced.run.event_types("last")
    (prefill,) = named(receiver, "prefill")
    assert prefill.attributes["proa.prefill.chunks"] == 1
    (decode,) = named(receiver, "decode")
    assert decode.events.keys() >= {"first_token", "preempted", "resumed"}


def test_a_failed_step_has_a_failed_span(receiver: OtlpReceiver) -> None:
    traced = TracedRun()
    traced.run.executor.fail_at = 1
    traced.submit(make_request("a"), sampled=True)
    with pytest.raises(RuntimeError, match="step 1 failed"):
        traced.run.steps(2)
    traced.tracer.shutdown()
    (step,) = [span for span in named(receiver, "step") if span.attributes["proa.step.number"] == 1]
    assert step.failed
    assert step.attributes["error.type"] == "RuntimeError"


def test_without_tracing_the_executor_is_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    executor = FakeExecutor()
    assert make_engine_tracer("m").trace_steps(executor) is executor
