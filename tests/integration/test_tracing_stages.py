"""Spans of the engine's and the gateway's tracers, each alone, received over OTLP."""

import os
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from proa.contract import (
    EngineCoreOutput,
    EngineCoreRequest,
    Event,
    EventType,
    FinishReason,
    KvFetch,
    KvLoad,
    SamplingParams,
)
from proa_engine.observability.telemetry import make_engine_tracer
from proa_engine.observability.worker_spans import WorkerTracer, make_worker_tracer
from proa_gateway.observability.outcome import Outcome
from proa_gateway.observability.telemetry import GatewayTracer
from support.otlp import OtlpReceiver

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
NOT_SAMPLED = PARENT[:-2] + "00"
QUEUED, SCHEDULED, FIRST_TOKEN, FINISHED = 1_700_000_000.0, 1_700_000_001.5, 1_700_000_002.0, 1_700_000_004.25


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        yield receiver


def request(*, traceparent: str = PARENT) -> EngineCoreRequest:
    return EngineCoreRequest(
        request_id="r",
        prompt_token_ids=[1, 2, 3],
        sampling_params=SamplingParams(max_tokens=8, temperature=0.5),
        trace_headers={"traceparent": traceparent},
        arrival_time=QUEUED,
    )


def output(*events: tuple[EventType, float], finish_reason: FinishReason | None = None) -> EngineCoreOutput:
    return EngineCoreOutput(
        request_id="r",
        client_index=1,
        events=[Event(*event) for event in events],
        finish_reason=finish_reason,
        num_prompt_tokens=3,
        num_output_tokens=5,
        num_cached_tokens=2,
    )


def seconds(start: int, end: int) -> float:
    return round((end - start) / 1e9, 6)


def test_stages_start_and_end_at_the_lifecycle_events(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    tracer.start_request(request())
    tracer.observe_outputs(
        [output((EventType.QUEUED, QUEUED), (EventType.SCHEDULED, SCHEDULED), (EventType.FIRST_TOKEN, FIRST_TOKEN))]
    )
    preempted = output((EventType.PREEMPTED, 1_700_000_003.0), (EventType.RESUMED, 1_700_000_003.5))
    tracer.observe_outputs([preempted])
    tracer.observe_outputs([output((EventType.FINISHED, FINISHED), finish_reason=FinishReason.STOP)])
    tracer.shutdown()
    spans = {span.name: span for span in receiver.spans}
    assert spans.keys() == {"llm_request", "queue", "prefill", "decode"}
    assert seconds(spans["queue"].start, spans["queue"].end) == 1.5
    assert seconds(spans["prefill"].start, spans["prefill"].end) == 0.5
    assert seconds(spans["decode"].start, spans["decode"].end) == 2.25
    assert spans["llm_request"].end == spans["decode"].end == int(FINISHED * 1e9)
    assert spans["decode"].events.keys() == {"first_token", "preempted", "resumed"}


def test_waiting_for_host_memory_has_a_span(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    tracer.start_request(request())
    finished = output((EventType.QUEUED, QUEUED), (EventType.FINISHED, FINISHED), finish_reason=FinishReason.STOP)
    finished.load = KvLoad(QUEUED, SCHEDULED, 48)
    tracer.observe_outputs([finished])
    tracer.shutdown()
    (load,) = (span for span in receiver.spans if span.name == "kv.load")
    assert seconds(load.start, load.end) == 1.5
    assert load.attributes["proa.kv.loaded_tokens"] == 48


def test_waiting_for_another_engine_has_a_span(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    tracer.start_request(request())
    finished = output((EventType.QUEUED, QUEUED), (EventType.FINISHED, FINISHED), finish_reason=FinishReason.STOP)
    finished.fetch = KvFetch(QUEUED, SCHEDULED, 48, 3000, "the source has closed the connection")
    tracer.observe_outputs([finished])
    tracer.shutdown()
    (fetch,) = (span for span in receiver.spans if span.name == "kv.fetch")
    assert seconds(fetch.start, fetch.end) == 1.5
    assert (fetch.attributes["proa.kv.fetched_tokens"], fetch.attributes["proa.kv.fetched_bytes"]) == (48, 3000)
    assert fetch.attributes["proa.kv.tier"] == "engine"
    assert fetch.attributes["error.type"] == "fetch"


def test_waiting_for_the_disk_has_a_span(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    tracer.start_request(request())
    finished = output((EventType.QUEUED, QUEUED), (EventType.FINISHED, FINISHED), finish_reason=FinishReason.STOP)
    finished.disk_read = KvFetch(QUEUED, SCHEDULED, 48, 3000)
    tracer.observe_outputs([finished])
    tracer.shutdown()
    (fetch,) = (span for span in receiver.spans if span.name == "kv.fetch")
    assert fetch.attributes["proa.kv.tier"] == "disk"


def test_llm_request_is_a_child_of_the_caller_and_carries_usage(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    headers = tracer.start_request(request())
    tracer.observe_outputs([output((EventType.FINISHED, FINISHED), finish_reason=FinishReason.LENGTH)])
    tracer.shutdown()
    (span,) = receiver.spans
    assert (span.service, span.kind) == ("proa-engine", "SERVER")
    assert (span.trace_id, span.parent_id) == (PARENT[3:35], PARENT[36:52])
    assert headers["traceparent"] == f"00-{span.trace_id}-{span.span_id}-01"
    assert span.attributes["gen_ai.provider.name"] == "proa"
    assert span.attributes["gen_ai.request.model"] == "m"
    assert span.attributes["gen_ai.request.max_tokens"] == 8
    assert span.attributes["gen_ai.usage.input_tokens"] == 3
    assert span.attributes["gen_ai.usage.output_tokens"] == 5
    assert span.attributes["gen_ai.usage.cache_read.input_tokens"] == 2
    assert span.attributes["gen_ai.response.finish_reasons"] == ["length"]
    assert not span.failed


def test_an_aborted_request_ends_its_spans_as_failed(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    tracer.start_request(request())
    tracer.observe_outputs([output((EventType.QUEUED, QUEUED), (EventType.SCHEDULED, SCHEDULED))])
    tracer.observe_outputs([output((EventType.FINISHED, FINISHED), finish_reason=FinishReason.ABORT)])
    tracer.shutdown()
    spans = {span.name: span for span in receiver.spans}
    assert spans.keys() == {"llm_request", "queue", "prefill"}
    assert {name for name, span in spans.items() if span.failed} == {"llm_request", "prefill"}
    assert spans["llm_request"].attributes["error.type"] == "abort"


def test_spans_end_for_a_rejected_request_and_at_shutdown(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    tracer.start_request(request())
    tracer.end_request("r", "resource_exhausted", "the queue is full")
    tracer.start_request(request())
    tracer.shutdown()
    assert [span.attributes["error.type"] for span in receiver.spans] == ["resource_exhausted", "shutdown"]


def test_each_rank_makes_a_child_span_of_the_engines_span(receiver: OtlpReceiver) -> None:
    engine = make_engine_tracer("m")
    headers = engine.start_request(request())
    workers = [make_worker_tracer(rank, stage=rank) for rank in range(2)]
    for worker in workers:
        assert isinstance(worker, WorkerTracer)
        worker.start("r", headers)
        worker.finish("r")
        worker.finish("unknown")
        worker.shutdown()
    engine.end_request("r", "shutdown")
    engine.shutdown()
    (parent,) = [span for span in receiver.spans if span.name == "llm_request"]
    ranks = [span for span in receiver.spans if span.name == "worker.rank"]
    assert [span.attributes["proa.worker.rank"] for span in ranks] == [0, 1]
    assert [span.attributes["proa.worker.stage"] for span in ranks] == [0, 1]
    assert {span.parent_id for span in ranks} == {parent.span_id}


def test_a_trace_that_is_not_sampled_makes_no_span_and_no_worker_headers(receiver: OtlpReceiver) -> None:
    tracer = make_engine_tracer("m")
    assert tracer.start_request(request(traceparent=NOT_SAMPLED)) == {}
    tracer.observe_outputs([output((EventType.FINISHED, FINISHED), finish_reason=FinishReason.STOP)])
    tracer.shutdown()
    assert receiver.spans == []


def test_the_gateways_spans_are_children_of_the_request_span(receiver: OtlpReceiver) -> None:
    tracer = GatewayTracer.from_environment()
    trace = tracer.start_request({"traceparent": PARENT}, "/v1/chat/completions")
    trace.set_request(operation="chat", model="m", base_model="m")
    trace.set_parameters({"stream": True, "max_tokens": 4, "seed": None})
    with trace.span("tokenize"):
        pass
    attempt = trace.start_attempt("10.0.0.1:50051", 2)
    headers = attempt.headers()
    attempt.finish("unavailable", "connection lost")
    trace.finish(
        Outcome(
            route="/v1/chat/completions", operation="chat", input_tokens=3, output_tokens=4, finish_reasons=["stop"]
        )
    )
    tracer.shutdown()
    spans = {span.name: span for span in receiver.spans}
    root = spans["POST /v1/chat/completions"]
    assert (root.kind, root.parent_id, root.service) == ("SERVER", PARENT[36:52], "proa-gateway")
    assert spans["tokenize"].parent_id == spans["Generate"].parent_id == root.span_id
    assert headers["traceparent"] == f"00-{root.trace_id}-{spans['Generate'].span_id}-01"
    assert spans["Generate"].kind == "CLIENT"
    assert spans["Generate"].failed
    assert spans["Generate"].attributes["server.address"] == "10.0.0.1"
    assert root.attributes["gen_ai.operation.name"] == "chat"
    assert root.attributes["gen_ai.request.max_tokens"] == 4
    assert root.attributes["gen_ai.response.finish_reasons"] == ["stop"]


def test_a_part_of_a_stage_has_a_span_in_that_of_the_stage(receiver: OtlpReceiver) -> None:
    tracer = GatewayTracer.from_environment()
    with tracer.part("images", {}):  # of a request without a trace
        pass
    trace = tracer.start_request({}, "/v1/chat/completions")
    with trace.span("tokenize"), tracer.part("images", {"proa.num_images": 2}):
        pass
    trace.finish(Outcome(route="", operation="chat"))
    tracer.shutdown()
    assert len(receiver.spans) == 3
    spans = {span.name: span for span in receiver.spans}
    assert spans["images"].parent_id == spans["tokenize"].span_id
    assert spans["images"].attributes["proa.num_images"] == 2


def test_a_stage_that_raises_has_a_failed_span(receiver: OtlpReceiver) -> None:
    tracer = GatewayTracer.from_environment()
    trace = tracer.start_request({}, "/v1/completions")
    with pytest.raises(ValueError, match="too long"), trace.span("admission"):
        raise ValueError("too long")
    trace.finish(Outcome(route="", operation="chat", status=400, error_type="ValueError"))
    tracer.shutdown()
    assert all(span.failed and span.attributes["error.type"] == "ValueError" for span in receiver.spans)
    assert len(receiver.spans) == 2


def test_standard_variables_name_the_service_and_choose_the_sampler(
    receiver: OtlpReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "renamed")
    tracer = GatewayTracer.from_environment()
    tracer.start_request({}, "/kept").finish(Outcome(route="", operation="chat"))
    tracer.shutdown()
    monkeypatch.setenv("OTEL_TRACES_SAMPLER", "always_off")
    tracer = GatewayTracer.from_environment()
    tracer.start_request({}, "/dropped").finish(Outcome(route="", operation="chat"))
    tracer.shutdown()
    assert [(span.service, span.name) for span in receiver.spans] == [("renamed", "POST /kept")]


def test_importing_telemetry_imports_no_sdk_and_sets_no_global_provider() -> None:
    check = (
        "import sys, proa_engine.observability.telemetry, proa_gateway.observability.telemetry\n"
        "from opentelemetry import trace\n"
        "assert not {'opentelemetry.sdk', 'opentelemetry.exporter'} & set(sys.modules)\n"
        "proa_gateway.observability.telemetry.GatewayTracer.from_environment()\n"
        "assert type(trace.get_tracer_provider()).__name__ == 'ProxyTracerProvider'\n"
    )
    environment = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"}
    subprocess.run([sys.executable, "-c", check], check=True, env={**os.environ, **environment})


def test_without_an_endpoint_nothing_is_recorded_but_the_clients_trace_context_is_passed_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    gateway = GatewayTracer.from_environment()
    trace = gateway.start_request({"traceparent": PARENT}, "/v1/completions")
    assert not trace.is_recording
    assert trace.start_attempt("a:1").headers() == {"traceparent": PARENT}
    engine = make_engine_tracer("m")
    assert engine.start_request(request()) == {}
    gateway.shutdown()
    engine.shutdown()


def test_shutdown_with_an_unreachable_collector_waits_at_most_for_the_export_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "2")  # seconds; the default is 10
    tracer = GatewayTracer.from_environment()
    tracer.start_request({}, "/v1/completions").finish(Outcome(route="", operation="chat"))
    started = time.monotonic()
    tracer.shutdown()
    assert time.monotonic() - started < 5
