"""One trace and two metrics pages from real processes: gateway, engine and a second rank."""

import secrets
import urllib.request
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import httpx
import pytest

from support.otlp import OtlpReceiver
from support.processes import engine_process, free_port, gateway_process
from support.scrape import Scrape

ROUTE = "/v1/chat/completions"
TOKENS = 12


@dataclass(frozen=True, slots=True)
class Stack:
    receiver: OtlpReceiver
    client: httpx.Client
    engine: str
    metrics_port: int


@pytest.fixture(scope="module")
def stack() -> Iterator[Stack]:
    port = free_port()
    arguments = ["--model", "builtin", "--served-model-name", "tiny", "--tensor-parallel-size", "2"]
    arguments += ["--metrics-port", str(port), "--max-num-batched-tokens", "128", "--num-gpu-blocks-override=64"]
    arguments += ["--max-model-len=1024"]
    with (
        OtlpReceiver() as receiver,
        engine_process(*arguments, env={**receiver.environment, "OMP_NUM_THREADS": "1"}) as (_, engine),
        gateway_process(engine, env=receiver.environment) as (_, gateway_port),
        httpx.Client(base_url=f"http://127.0.0.1:{gateway_port}", timeout=60) as client,
    ):
        yield Stack(receiver, client, engine, port)


def chat(stack: Stack, **headers: str) -> None:
    messages = [{"role": "user", "content": "Go on, and on."}]
    body = {"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}
    answer = stack.client.post(ROUTE, json=body, headers=headers)
    assert answer.text.endswith("data: [DONE]\n\n")


def test_one_trace_covers_the_http_request_and_each_rank(stack: Stack) -> None:
    trace_id, caller = secrets.token_hex(16), secrets.token_hex(8)
    chat(stack, traceparent=f"00-{trace_id}-{caller}-01")
    stages = ("tokenize", "admission", "route", "Generate", "llm_request", "queue", "prefill", "decode")
    wanted = Counter([f"POST {ROUTE}", *stages, "worker.rank", "worker.rank"])
    spans = stack.receiver.wait(
        lambda spans: Counter(span.name for span in spans if span.trace_id == trace_id) >= wanted, seconds=30
    )
    spans = [span for span in spans if span.trace_id == trace_id]
    assert Counter(span.name for span in spans) == wanted
    ids = {span.span_id: span for span in spans}
    (root,) = [span for span in spans if span.parent_id not in ids]
    assert (root.name, root.parent_id) == (f"POST {ROUTE}", caller)
    ranks = [span for span in spans if span.name == "worker.rank"]
    assert {ids[span.parent_id].name for span in ranks} == {"llm_request"}
    assert sorted(span.attributes["proa.worker.rank"] for span in ranks) == [0, 1]
    assert len({span.service for span in spans}) == 3
    assert not any(span.failed for span in spans)


def test_both_pages_count_the_same_request(stack: Stack) -> None:
    before = Scrape(_page(stack.metrics_port))
    chat(stack)
    after = Scrape(_page(stack.metrics_port))
    gained = after.value("vllm:generation_tokens_total") - before.value("vllm:generation_tokens_total")
    assert gained == TOKENS
    assert after.value("vllm:request_success_total", finished_reason="length", model_name="tiny") >= 1
    assert after.value("proa_engine_step_duration_seconds_count") > 0
    assert after.value("vllm:cache_config_info", num_gpu_blocks="64") == 1
    gateway = Scrape(stack.client.get("/metrics").text)
    assert gateway.value("proa_gateway_requests_total", route=ROUTE, status="200") >= 1
    assert gateway.value("gen_ai_server_time_to_first_token_seconds_count", gen_ai_request_model="tiny") >= 1
    assert gateway.value("proa_gateway_sessions") == 1
    for name in ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc"):
        assert gateway.value(f"vllm:{name}", engine=stack.engine, model_name="tiny") == 0


def _page(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        page: str = answer.read().decode()
    return page
