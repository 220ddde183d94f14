"""One trace for each request over a gateway process and an engine server, received over OTLP."""

import secrets
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from support.engine_server import LoadedFakeExecutor, running_server
from support.fake_engine import tokenizer_files
from support.fake_executor import FakeModelConfig
from support.otlp import OtlpReceiver, ReceivedSpan
from support.processes import gateway_process

ROUTE = "/v1/chat/completions"
ROOT = f"POST {ROUTE}"
PARENTS = {
    "tokenize": ROOT,
    "admission": ROOT,
    "route": ROOT,
    "Generate": ROOT,
    "llm_request": "Generate",
    "queue": "llm_request",
    "prefill": "llm_request",
    "decode": "llm_request",
}


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, data in tokenizer_files().items():
        (folder / name).write_bytes(data)
    return folder


@pytest.fixture(scope="module")
def receiver() -> Iterator[OtlpReceiver]:
    with OtlpReceiver() as receiver, pytest.MonkeyPatch.context() as patch:
        for name, value in receiver.environment.items():
            patch.setenv(name, value)
        yield receiver


@contextmanager
def serving(folder: Path, *, fail_at: int | None = None) -> Iterator[httpx.Client]:
    """A gateway process before an engine server whose steps take 20 ms."""
    executor = LoadedFakeExecutor(
        num_blocks=512,
        max_model_len=1024,
        model_config=FakeModelConfig(1000),
        while_waiting=lambda: time.sleep(0.02),
        fail_at=fail_at,
    )
    with (
        running_server(executor, tokenizer_folder=folder) as server,
        gateway_process(f"127.0.0.1:{server.port}") as (_, port),
        httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=20) as client,
    ):
        yield client


@pytest.fixture(scope="module")
def client(receiver: OtlpReceiver, tokenizer_folder: Path) -> Iterator[httpx.Client]:
    with serving(tokenizer_folder) as client:
        yield client


class Caller:
    """A client with a trace of its own, and the spans of that trace."""

    def __init__(self, receiver: OtlpReceiver) -> None:
        self.trace_id = secrets.token_hex(16)
        self.span_id = secrets.token_hex(8)
        self.headers = {"traceparent": f"00-{self.trace_id}-{self.span_id}-01"}
        self._receiver = receiver

    def spans(self, *names: str) -> dict[str, ReceivedSpan]:
        """Wait for as many spans of each name as given, check that there are no others, and return them by name."""
        wanted = Counter(names)
        self._receiver.wait(lambda spans: Counter(s.name for s in spans if s.trace_id == self.trace_id) >= wanted)
        found = [span for span in self._receiver.spans if span.trace_id == self.trace_id]
        assert Counter(span.name for span in found) == wanted
        return {span.name: span for span in found}


@pytest.fixture
def caller(receiver: OtlpReceiver) -> Caller:
    return Caller(receiver)


def body(**changes: object) -> dict[str, object]:
    messages = [{"role": "user", "content": secrets.token_hex(4)}]
    return {"messages": messages, "stream": True, "max_tokens": 6, "ignore_eos": True, **changes}


def test_a_request_is_one_trace_with_a_complete_parent_chain(
    client: httpx.Client, caller: Caller, receiver: OtlpReceiver
) -> None:
    answer = client.post(ROUTE, json=body(), headers=caller.headers)
    assert answer.text.endswith("data: [DONE]\n\n")
    spans = caller.spans(ROOT, *PARENTS)
    assert spans[ROOT].parent_id == caller.span_id
    for child, parent in PARENTS.items():
        assert spans[child].parent_id == spans[parent].span_id, child
        assert spans[parent].start <= spans[child].start <= spans[child].end, child
        assert spans[child].end <= spans[parent].end + 1_000_000, child  # the parent may be ended a little later
    assert {span.service for name, span in spans.items() if name in ("llm_request", "decode")} == {"proa-engine"}
    root, engine = spans[ROOT].attributes, spans["llm_request"].attributes
    assert root["gen_ai.usage.output_tokens"] == engine["gen_ai.usage.output_tokens"] == 6
    assert root["gen_ai.usage.input_tokens"] == engine["gen_ai.usage.input_tokens"] > 0
    assert root["gen_ai.response.finish_reasons"] == engine["gen_ai.response.finish_reasons"] == ["length"]
    assert not any(span.failed for span in spans.values())
    assert spans["queue"].end == spans["prefill"].start
    assert spans["prefill"].end == spans["decode"].start
    assert spans["decode"].end == spans["llm_request"].end
    assert spans["prefill"].attributes["proa.prefill.chunks"] == 1
    linked = [spans["llm_request"].span_id]
    receiver.wait(lambda spans: sum(span.name == "step" and span.links == linked for span in spans) == 6)


def test_each_choice_has_its_own_attempt(client: httpx.Client, caller: Caller, receiver: OtlpReceiver) -> None:
    client.post(ROUTE, json=body(n=3), headers=caller.headers)
    stages = ("route", "Generate", "llm_request", "queue", "prefill", "decode")
    caller.spans(ROOT, "tokenize", "admission", *stages, *stages, *stages)
    spans = [span for span in receiver.spans if span.trace_id == caller.trace_id]
    attempts = {span.span_id for span in spans if span.name == "Generate"}
    assert {span.parent_id for span in spans if span.name == "llm_request"} == attempts
    assert len(attempts) == 3


def test_a_disconnected_client_leaves_an_ended_trace(client: httpx.Client, caller: Caller) -> None:
    with client.stream("POST", ROUTE, json=body(max_tokens=800), headers=caller.headers) as answer:
        next(answer.iter_lines())
    spans = caller.spans(ROOT, *PARENTS)
    failed = {name: span.attributes["error.type"] for name, span in spans.items() if span.failed}
    assert failed == {ROOT: "client_disconnected", "Generate": "aborted", "llm_request": "abort", "decode": "abort"}


def test_a_rejected_request_leaves_an_ended_trace(client: httpx.Client, caller: Caller) -> None:
    long = [{"role": "user", "content": "~" * 1500}]
    answer = client.post(ROUTE, json=body(messages=long), headers=caller.headers)
    assert answer.status_code == 400
    spans = caller.spans(ROOT, "tokenize", "admission")
    assert spans[ROOT].attributes["error.type"] == "context_length_exceeded"
    assert spans[ROOT].attributes["http.response.status_code"] == 400
    assert spans["admission"].failed


def test_a_caller_without_a_trace_gets_a_new_one(client: httpx.Client, receiver: OtlpReceiver) -> None:
    answer = client.post(ROUTE, json=body(stream=False))

    def ours(spans: list[ReceivedSpan]) -> list[ReceivedSpan]:
        return [span for span in spans if span.attributes.get("gen_ai.response.id") == answer.json()["id"]]

    (root,) = ours(receiver.wait(lambda spans: bool(ours(spans))))
    assert (root.name, root.parent_id) == (ROOT, "")


def test_a_failing_engine_leaves_ended_spans(receiver: OtlpReceiver, tokenizer_folder: Path, caller: Caller) -> None:
    with serving(tokenizer_folder, fail_at=20) as client:
        answer = client.post(ROUTE, json=body(max_tokens=800), headers=caller.headers)
        assert "error" in answer.text
        spans = caller.spans(ROOT, *PARENTS, "route")  # again, for a second engine, of which there is none
    assert {name for name, span in spans.items() if span.failed} == {ROOT, "Generate", "llm_request", "decode", "route"}
