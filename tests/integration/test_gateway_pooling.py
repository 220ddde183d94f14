"""Embeddings and classes with an engine that computes values from its prompts without a model."""

import asyncio
import json
from array import array
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path
from time import perf_counter
from typing import Any

import jsonschema
import pytest
from openai import BadRequestError

from proa.engine.v1 import core_pb2
from proa_gateway.pooling.encoder import to_bytes
from proa_gateway.pooling.job import MAX_RUNNING
from support.fake_engine import LABELS, FakeEngine, pool, prompt_ids, tokenizer_files
from support.gateway import RunningGateway, chat_body, running_gateway, until
from support.otlp import OtlpReceiver
from support.tokenizers import byte_level_tokenizer

EMBED, TOKEN_EMBED = core_pb2.POOLING_TASK_EMBED, core_pb2.POOLING_TASK_TOKEN_EMBED
CLASSIFY, TOKEN_CLASSIFY = core_pb2.POOLING_TASK_CLASSIFY, core_pb2.POOLING_TASK_TOKEN_CLASSIFY
ALL = (EMBED, TOKEN_EMBED, CLASSIFY, TOKEN_CLASSIFY)


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(pooling_tasks=ALL) as engine:
        yield engine


@pytest.fixture
async def gateway(engine: FakeEngine) -> AsyncIterator[RunningGateway]:
    async with running_gateway(engine) as gateway:
        yield gateway


def ids_of(text: str) -> list[int]:
    ids: list[int] = byte_level_tokenizer().encode(text).ids
    return ids


def values_of(token_ids: list[int], task: Any = EMBED, **params: Any) -> list[list[float]]:
    """What the engine computes, in its precision."""
    request = core_pb2.EngineCoreRequest(prompt_token_ids=array("I", token_ids).tobytes())
    request.pooling_params.CopyFrom(core_pb2.PoolingParams(task=task, **params))
    return [array("f", row).tolist() for row in pool(request)]


async def post(gateway: RunningGateway, path: str = "/v1/embeddings", **fields: Any) -> Any:
    response = await gateway.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def test_openais_client_gets_the_values_in_both_encodings(gateway: RunningGateway) -> None:
    (expected,) = values_of(ids_of("Hi there"))
    for options in ({}, {"encoding_format": "float"}, {"encoding_format": "base64"}):
        answer = await gateway.openai.embeddings.create(model="fake", input="Hi there", **options)  # type: ignore[arg-type]
        embedding: Any = answer.data[0].embedding
        if isinstance(embedding, str):
            embedding = array("f", b64decode(embedding)).tolist()
        assert embedding == expected
        assert (answer.object, answer.model, answer.data[0].index) == ("list", "fake", 0)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens == len(ids_of("Hi there"))


async def test_every_form_of_input_gives_the_same_embeddings(gateway: RunningGateway) -> None:
    texts = ["one two", "three", "The quick brown fox"]
    ids = [ids_of(text) for text in texts]
    expected = [values_of(each)[0] for each in ids]
    for batch in (texts, ids):
        answer = await gateway.openai.embeddings.create(model="fake", input=batch)
        assert [each.embedding for each in answer.data] == expected
        assert [each.index for each in answer.data] == [0, 1, 2]
    for single in (texts[2], ids[2]):
        answer = await gateway.openai.embeddings.create(model="fake", input=single)
        assert [each.embedding for each in answer.data] == expected[2:]


async def test_the_fields_of_an_embedding_reach_the_engine(gateway: RunningGateway, engine: FakeEngine) -> None:
    body = await post(gateway, input="Hi", dimensions=4, use_activation=False, priority=3, cache_salt="s")
    assert body["data"][0]["embedding"] == values_of(ids_of("Hi"), dimensions=4, use_activation=False)[0]
    (request,) = engine.requests
    assert (request.priority, request.cache_salt, len(request.resumed_token_ids)) == (3, "s", 0)
    await post(gateway, input="Hi", normalize=False)
    assert engine.requests[-1].pooling_params.use_activation is False


async def test_bytes_of_base64_are_in_the_order_that_is_asked_for(gateway: RunningGateway) -> None:
    little, big = [
        b64decode((await post(gateway, input="Hi", encoding_format="base64", endianness=each))["data"][0]["embedding"])
        for each in ("little", "big")
    ]
    assert [little[start : start + 4] for start in range(0, 32, 4)] == [
        big[start : start + 4][::-1] for start in range(0, 32, 4)
    ]


async def test_inputs_are_truncated_on_demand(gateway: RunningGateway, engine: FakeEngine) -> None:
    ids = ids_of("The quick brown fox jumps over the lazy dog.")
    for side, kept in (("right", ids[:3]), ("left", ids[-3:])):
        for value in ("The quick brown fox jumps over the lazy dog.", ids):
            await post(gateway, input=value, truncate_prompt_tokens=3, truncation_side=side)
            assert prompt_ids(engine.requests[-1]) == kept
    body = await post(gateway, input=[7] * 5000, truncate_prompt_tokens=-1)
    assert body["usage"]["prompt_tokens"] == 4096


async def test_a_chat_is_embedded_as_its_template_writes_it(gateway: RunningGateway, engine: FakeEngine) -> None:
    for opens in (False, True):
        await post(gateway, **chat_body("Hi"), add_generation_prompt=opens)
        text = byte_level_tokenizer().decode(prompt_ids(engine.requests[-1]))
        assert text == "user: Hi\n" + "assistant: " * opens


async def test_pooling_has_the_values_of_every_task(gateway: RunningGateway) -> None:
    ids = ids_of("Hi there")
    expected: Any
    for task, expected in (
        ("embed", values_of(ids)[0]),
        ("token_embed", values_of(ids, TOKEN_EMBED)),
        ("classify", values_of(ids, CLASSIFY)[0]),
        ("token_classify", values_of(ids, TOKEN_CLASSIFY)),
    ):
        body = await post(gateway, "/pooling", input="Hi there", task=task)
        assert body["data"] == [{"index": 0, "object": "pooling", "data": expected}]
        encoded = await post(gateway, "/pooling", input="Hi there", task=task, encoding_format="base64")
        flat = [value for row in expected for value in row] if task.startswith("token") else expected
        assert array("f", b64decode(encoded["data"][0]["data"])).tolist() == flat


async def test_a_model_that_only_embeds_tokens_has_rows_of_embeddings() -> None:
    async with FakeEngine(pooling_tasks=[TOKEN_EMBED]) as engine, running_gateway(engine) as gateway:
        body = await post(gateway, input="Hi there")
        expected = values_of(ids_of("Hi there"), TOKEN_EMBED)
        assert body["data"] == [{"index": 0, "object": "embedding", "embedding": expected}]


async def test_bytes_are_described_by_a_header(gateway: RunningGateway) -> None:
    ids = [ids_of(text) for text in ("one", "Hi there")]
    rows = [values_of(each, TOKEN_EMBED) for each in ids]
    expected = [
        to_bytes(b"".join(array("f", row).tobytes() for row in each), "bfloat16", big_endian=True) for each in rows
    ]
    fields = {"input": ids, "task": "token_embed", "embed_dtype": "bfloat16", "endianness": "big"}
    response = await gateway.http.post("/pooling", json=fields | {"encoding_format": "bytes"})
    assert response.headers["content-type"] == "application/octet-stream"
    assert response.content == b"".join(expected)
    metadata = json.loads(response.headers["metadata"])
    places = [response.content[place["start"] : place["end"]] for place in metadata["data"]]
    assert places == expected
    assert [place["shape"] for place in metadata["data"]] == [[len(each), len(each[0])] for each in rows]
    assert metadata["usage"]["prompt_tokens"] == sum(map(len, ids))
    only = await gateway.http.post("/pooling", json=fields | {"encoding_format": "bytes_only"})
    assert (only.content, "metadata" in only.headers) == (response.content, False)
    text = await post(gateway, "/pooling", **fields, encoding_format="base64")
    assert [b64decode(each["data"]) for each in text["data"]] == expected


async def test_coheres_embeddings_have_every_type(gateway: RunningGateway) -> None:
    texts = ["one two", "three"]
    values = [values_of(ids_of(text))[0] for text in texts]
    bits = [sum((value >= 0) << (7 - index) for index, value in enumerate(each)) for each in values]
    body = await post(gateway, "/v2/embed", texts=texts, embedding_types=["float", "base64", "binary", "ubinary"])
    found = body["embeddings"]
    assert found["float"] == values
    assert [array("f", b64decode(text)).tolist() for text in found["base64"]] == values
    assert found["ubinary"] == [[packed] for packed in bits]
    assert found["binary"] == [[packed - 128] for packed in bits]
    assert (body["texts"], body["response_type"]) == (texts, "embeddings_by_type")
    units = {"input_tokens": sum(len(ids_of(text)) for text in texts), "image_tokens": 0}
    assert body["meta"] == {"api_version": {"version": "2"}, "billed_units": units}
    inputs = [{"content": [{"type": "text", "text": text}]} for text in texts]
    assert (await post(gateway, "/v2/embed", inputs=inputs))["embeddings"] == {"float": values}


async def test_coheres_inputs_are_cut_where_truncate_says(gateway: RunningGateway, engine: FakeEngine) -> None:
    ids = ids_of("one two three four")
    for truncate, kept in ((None, ids[:2]), ("END", ids[:2]), ("START", ids[-2:])):
        await post(gateway, "/v2/embed", texts=["one two three four"], max_tokens=2, truncate=truncate)
        assert prompt_ids(engine.requests[-1]) == kept


async def test_input_type_names_a_prompt_of_the_models_files() -> None:
    prompts = {"query": "Find: ", "document": ""}
    files = tokenizer_files() | {"config_sentence_transformers.json": json.dumps({"prompts": prompts}).encode()}
    async with FakeEngine(pooling_tasks=ALL, files=files) as engine, running_gateway(engine) as gateway:
        for name, text in (("query", "Find: Hi"), ("document", "Hi"), (None, "Hi")):
            await post(gateway, "/v2/embed", texts=["Hi"], input_type=name)
            assert prompt_ids(engine.requests[-1]) == ids_of(text)
        response = await gateway.http.post("/v2/embed", json={"texts": ["Hi"], "input_type": "classification"})
        assert "supported: document, query" in response.json()["error"]["message"]


async def test_classes_have_a_label_and_probabilities(gateway: RunningGateway, engine: FakeEngine) -> None:
    body = await post(gateway, "/classify", input=["Hi", [3]], use_activation=False)
    assert engine.requests[-1].pooling_params.use_activation is False
    for index, ids in enumerate((ids_of("Hi"), [3])):
        (values,) = values_of(ids, CLASSIFY)
        label = LABELS[values.index(max(values))]
        assert body["data"][index] == {"index": index, "label": label, "probs": values, "num_classes": 3}


async def test_many_inputs_run_some_at_a_time_and_keep_their_order(gateway: RunningGateway, engine: FakeEngine) -> None:
    engine.info.max_num_seqs = 10**6
    inputs = [[1 + index % 300, 1 + index // 300] for index in range(2 * MAX_RUNNING + 9)]
    most, step = 0, engine.step

    async def count_and_step() -> None:
        nonlocal most
        most = max(most, engine.num_unfinished)
        await step()

    engine.step = count_and_step  # type: ignore[method-assign]
    body = await post(gateway, input=inputs)
    assert [each["embedding"] for each in body["data"]] == [values_of(ids)[0] for ids in inputs]
    assert 0 < most <= MAX_RUNNING


async def test_a_disconnect_aborts_all_inputs(gateway: RunningGateway, engine: FakeEngine) -> None:
    engine.step_delay = None
    request = asyncio.create_task(post(gateway, input=[[1], [2], [3]]))
    await engine.until(lambda it: it.num_unfinished == 3)
    request.cancel()
    await engine.until(lambda it: it.num_unfinished == 0)
    assert len(engine.aborted) == 3


async def test_a_failed_input_fails_the_call_and_aborts_the_others(gateway: RunningGateway, engine: FakeEngine) -> None:
    engine.pool = lambda request: [] if prompt_ids(request) == [2] else pool(request)
    engine.info.max_num_seqs = 2
    response = await gateway.http.post("/v1/embeddings", json={"input": [[1], [2], *[[3]] * 50]})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")
    await engine.until(lambda it: it.num_unfinished == 0)


async def test_values_that_are_not_finite_are_an_error(gateway: RunningGateway, engine: FakeEngine) -> None:
    engine.pool = lambda request: [[1.0, float("nan")]]
    response = await gateway.http.post("/v1/embeddings", json={"input": "Hi"})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "generation_failed")


async def test_inputs_of_a_lost_engine_are_computed_by_another() -> None:
    first, second = FakeEngine(pooling_tasks=ALL, step_delay=None), FakeEngine(pooling_tasks=ALL)
    async with first, second, running_gateway(first, second) as gateway:
        inputs = [[1 + index] for index in range(40)]
        request = asyncio.create_task(post(gateway, input=inputs))
        await first.until(lambda it: it.num_unfinished > 0)
        await until(lambda: second.requests and not second.num_unfinished)
        await first.stop()
        body = await request
        assert [each["embedding"] for each in body["data"]] == [values_of(ids)[0] for ids in inputs]
        assert len(second.requests) == 40


REFUSED: list[tuple[str, dict[str, Any], int, str]] = [
    ("/v1/embeddings", {}, 400, "either input or messages"),
    ("/v1/embeddings", {"input": []}, 400, "input: must be a string"),
    ("/v1/embeddings", {"input": ""}, 400, "no tokens"),
    ("/v1/embeddings", {"input": ["a", ""]}, 400, "Input 1 has no tokens"),
    ("/v1/embeddings", {"input": [[]]}, 400, "input: must be"),
    ("/v1/embeddings", {"input": 5}, 400, "input: must be"),
    ("/v1/embeddings", {"input": [1.5]}, 400, "input: must be"),
    ("/v1/embeddings", {"input": [True]}, 400, "input: must be"),
    ("/v1/embeddings", {"input": {"text": "a"}}, 400, "input: must be"),
    ("/v1/embeddings", {"input": "\ud800"}, 400, "lone surrogate"),
    ("/v1/embeddings", {"input": [[10**9]]}, 400, "input: token id 1000000000"),
    ("/v1/embeddings", {"input": [-1]}, 400, "input: token id -1"),
    ("/v1/embeddings", {"input": [2] * 5000}, 400, "maximum context length is 4096"),
    ("/v1/embeddings", {"input": ["a"] * 100_000}, 400, "must not have more than 16384"),
    ("/v1/embeddings", {"input": ["a"] * 10_000}, 400, "10000 inputs are above the limit of 2048"),
    ("/v1/embeddings", {"input": [[2] * 4000] * 300}, 400, "The body has too many values"),
    ("/v1/embeddings", {"input": ["é" * 4000] * 300}, 400, "tokens are above the limit"),
    ("/pooling", {"input": [[2] * 4000] * 170, "dimensions": 17}, 400, "dimensions must not be above"),
    ("/v1/embeddings", {"input": "a", "dimensions": 10**6}, 400, "dimensions must not be above the model's 8"),
    ("/v1/embeddings", {"input": "a", "dimensions": 0}, 400, "dimensions"),
    ("/v1/embeddings", {"input": "a", "encoding_format": "int8"}, 400, "encoding_format"),
    ("/v1/embeddings", {"input": ["a"] * 257, "encoding_format": "bytes"}, 400, "use bytes_only"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 5000}, 400, "truncate_prompt_tokens must not be"),
    ("/v1/embeddings", {"input": "a", "truncate_prompt_tokens": 0}, 400, "truncate_prompt_tokens"),
    ("/v1/embeddings", {"input": "a", "embed_dtype": "float64"}, 400, "embed_dtype"),
    ("/v2/embed", {}, 400, "either texts or inputs"),
    ("/v2/embed", {"texts": ["a"], "inputs": ["a"]}, 400, "either texts or inputs"),
    ("/v2/embed", {"texts": []}, 400, "texts"),
    ("/v2/embed", {"texts": ["a", ""]}, 400, "Input 1 has no tokens"),
    ("/v2/embed", {"texts": ["a"], "embedding_types": ["int8"]}, 400, "embedding_types"),
    ("/v2/embed", {"texts": ["a"], "input_type": "query"}, 400, "Unsupported input_type 'query'"),
    ("/v2/embed", {"texts": ["a"], "output_dimension": 9}, 400, "output_dimension must not be above the model's 8"),
    ("/v2/embed", {"texts": ["a"], "output_dimension": 4, "embedding_types": ["binary"]}, 400, "a multiple of 8"),
    ("/v2/embed", {"texts": ["a " * 5000], "truncate": "NONE"}, 400, "maximum context length is 4096"),
    ("/v2/embed", {"texts": ["a b c"], "truncate": "NONE", "max_tokens": 2}, 400, "max_tokens is 2"),
    ("/v2/embed", {"images": ["data:image/png;base64,"], "texts": ["a"]}, 400, "images is not supported"),
    ("/v1/embeddings", {"input": "a", "padding": "max_length"}, 400, "padding is not supported: inputs are not padded"),
    ("/pooling", {"input": "a", "late_chunking_params": {"chunk_size": 5}}, 400, "late_chunking_params"),
    ("/v1/embeddings", {"input": "a", "stream": True}, 400, "stream is not supported: there is one response"),
    ("/v1/embeddings", {"input": "a", "model": "other"}, 404, "The model 'other' does not exist"),
    ("/pooling", {"input": "a", "task": "plugin"}, 400, "task"),
    ("/pooling", {"input": "a", "task": "classify", "dimensions": 2}, 400, "dimensions is only for embeddings"),
    ("/classify", {"input": "a", "softmax": True}, 400, "softmax is not supported: use use_activation"),
]


async def test_what_cannot_be_served_is_refused_by_name(gateway: RunningGateway) -> None:
    headers = {"content-type": "application/json"}
    for path, fields, status, message in REFUSED:
        started = perf_counter()
        response = await gateway.http.post(path, content=json.dumps(fields), headers=headers)
        assert perf_counter() - started < 10
        assert response.status_code == status, response.text
        assert message in response.json()["error"]["message"]


async def test_a_response_of_too_many_values_is_refused() -> None:
    async with FakeEngine(pooling_tasks=ALL, embedding_size=4096) as engine, running_gateway(engine) as gateway:
        response = await gateway.http.post("/pooling", json={"input": [[2] * 2048] * 3})
        assert "the limit of one response is" in response.json()["error"]["message"]


async def test_models_without_the_task_are_named_with_what_they_have() -> None:
    async with FakeEngine() as engine, running_gateway(engine) as gateway:
        for path in ("/v1/embeddings", "/v2/embed", "/pooling", "/classify", "/score", "/rerank"):
            fields = {
                "/v2/embed": {"texts": ["a"]},
                "/score": {"text_1": "a", "text_2": "b"},
                "/rerank": {"query": "a", "documents": ["b"]},
            }
            response = await gateway.http.post(path, json=fields.get(path, {"input": "a"}))
            error = response.json()["error"]
            assert (response.status_code, error["code"], error["param"]) == (400, "unsupported_task", "model")
            assert error["message"].endswith("it has generated text.")


async def test_models_that_only_pool_generate_nothing() -> None:
    async with FakeEngine(pooling_tasks=(EMBED,), pooling_only=True) as engine, running_gateway(engine) as gateway:
        with pytest.raises(BadRequestError, match="generates no text"):
            await gateway.openai.completions.create(model="fake", prompt="Hi")
        response = await gateway.chat()
        assert response.json()["error"]["code"] == "unsupported_task"
        assert (await post(gateway, input="Hi"))["data"]
        assert (await gateway.http.get("/v1/models")).json()["data"][0]["id"] == "fake"


async def test_requests_are_counted_and_named(gateway: RunningGateway) -> None:
    response = await gateway.http.post("/v1/embeddings", json={"input": ["a", "b"], "request_id": "mine", "newer": 1})
    assert response.json()["id"] == "embd-mine"
    assert response.headers["x-request-id"] == "mine"
    assert response.headers["x-proa-ignored-fields"] == "newer"
    metrics = (await gateway.http.get("/metrics")).text
    assert 'vllm:request_success_total{finished_reason="stop",model_name="fake"} 2.0' in metrics
    assert 'vllm:prompt_tokens_total{model_name="fake"} 2.0' in metrics
    assert 'vllm:e2e_request_latency_seconds_count{model_name="fake"} 1.0' in metrics
    assert 'gen_ai_operation_name="embeddings"' in metrics
    assert 'proa_gateway_requests_total{error_type="",route="/v1/embeddings",status="200"} 1.0' in metrics


async def test_limits_and_priorities_of_keys_hold(engine: FakeEngine, tmp_path: Path) -> None:
    keys = [{"name": "a", "key": "sk-a", "tokens_per_minute": 20, "priority": 7}]
    (tmp_path / "keys.json").write_text(json.dumps({"keys": keys}))
    async with running_gateway(engine, api_keys=tmp_path / "keys.json") as gateway:
        headers = {"authorization": "Bearer sk-a"}
        body = {"input": [[1] * 8, [2] * 8], "priority": -5}
        first, second = [await gateway.http.post("/v1/embeddings", json=body, headers=headers) for _ in range(2)]
        assert (first.status_code, second.status_code) == (200, 429)
        assert [request.priority for request in engine.requests] == [7, 7]
        assert (await gateway.http.post("/v1/embeddings", json=body)).status_code == 401


async def test_a_trace_has_a_span_for_each_input(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    with OtlpReceiver() as receiver:
        for name, value in receiver.environment.items():
            monkeypatch.setenv(name, value)
        async with running_gateway(engine) as gateway:
            response = await gateway.http.post("/v1/embeddings", json={"input": ["a", "b"]})
        spans = receiver.wait(lambda spans: any(span.name == "POST /v1/embeddings" for span in spans))
    (root,) = [span for span in spans if span.name == "POST /v1/embeddings"]
    assert root.attributes["gen_ai.operation.name"] == "embeddings"
    assert root.trace_id == response.headers["x-trace-id"]
    children = [span.name for span in spans if span.parent_id == root.span_id]
    assert sorted(children) == ["Generate", "Generate", "admission", "route", "route", "tokenize"]
    assert all(request.trace_headers["traceparent"] for request in engine.requests)


async def test_invocations_are_sent_to_the_endpoint_of_their_fields(gateway: RunningGateway) -> None:
    assert (await post(gateway, "/invocations", input="a"))["data"][0]["object"] == "embedding"
    assert (await post(gateway, "/invocations", query="a", documents=["b"]))["results"]
    assert (await post(gateway, "/invocations", text_1="a", text_2="b"))["data"][0]["object"] == "score"
    chat = chat_body("a")
    assert (await post(gateway, "/invocations", **chat))["choices"]
    assert (await post(gateway, "/invocations", **chat, encoding_format="float"))["data"][0]["object"] == "embedding"


@pytest.mark.parametrize(
    ("task", "field"),
    [(EMBED, "embedding"), (TOKEN_EMBED, "embedding"), (CLASSIFY, "probs"), (TOKEN_CLASSIFY, "data")],
)
async def test_chats_with_models_that_only_pool_are_invoked_for_values(task: Any, field: str) -> None:
    async with FakeEngine(pooling_tasks=(task,), pooling_only=True) as engine, running_gateway(engine) as gateway:
        for fields in (chat_body("a"), {"input": "a"}, {"model": "fake", "input": "a"}):
            assert (await post(gateway, "/invocations", **fields))["data"][0][field]
        response = await gateway.http.post(
            "/invocations", json={"model": "other", **chat_body("a")} | {"model": "other"}
        )
        assert response.status_code == 404


async def test_responses_are_as_the_openapi_document_describes_them(gateway: RunningGateway) -> None:
    document = (await gateway.http.get("/openapi.json")).json()
    bodies: dict[str, list[dict[str, Any]]] = {
        "/v2/embed": [{"texts": ["a"]}, {"inputs": ["a"], "embedding_types": ["base64", "binary", "ubinary"]}],
        "/v1/embeddings": [{"input": "a"}, {"input": "a", "encoding_format": "base64"}],
        "/pooling": [{"input": "a", "task": "token_embed"}, {"input": "a", "task": "classify"}],
        "/classify": [{"input": ["a", "b"]}],
        "/score": [{"text_1": "a", "text_2": ["b", "c"]}],
        "/rerank": [{"query": "a", "documents": ["b"]}, {"query": "a", "documents": "b", "return_documents": False}],
    }
    for path, requests in bodies.items():
        schema = document["paths"][path]["post"]["responses"]["200"]["content"]["application/json"]["schema"]
        for body in requests:
            jsonschema.validate(await post(gateway, path, **body), schema | {"components": document["components"]})
