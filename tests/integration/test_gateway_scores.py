"""Scores of pairs and ranked documents, by each kind of model, with an engine without a model."""

import json
import math
import operator
from array import array
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from proa.engine.v1 import core_pb2
from support.fake_engine import FakeEngine, pool, prompt_ids, tokenizer_files
from support.gateway import RunningGateway, running_gateway
from support.tokenizers import byte_level_tokenizer

EMBED, CLASSIFY = core_pb2.POOLING_TASK_EMBED, core_pb2.POOLING_TASK_CLASSIFY
TOKEN_LOGPROBS = core_pb2.POOLING_TASK_TOKEN_LOGPROBS
DOCUMENTS = ["The quick brown fox", "one", "jumps over the lazy dog"]
QUESTION = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
ANSWER = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"


def cross_encoder(**options: Any) -> FakeEngine:
    """One value of a pair: a number from 0 to 1 that depends on its first and last token."""

    def value(request: core_pb2.EngineCoreRequest) -> list[list[float]]:
        ids = prompt_ids(request)
        return [[(ids[0] * 7 + ids[-1] * 31) % 16 / 16]]

    return FakeEngine(pooling_tasks=(CLASSIFY,), labels=("LABEL_0",), pool=value, pooling_only=True, **options)


def text_of(request: core_pb2.EngineCoreRequest) -> str:
    text: str = byte_level_tokenizer().decode(prompt_ids(request), skip_special_tokens=False)
    return text


async def post(gateway: RunningGateway, path: str, **fields: Any) -> Any:
    response = await gateway.http.post(path, json=fields)
    assert response.status_code == 200, response.text
    return response.json()


async def scores(gateway: RunningGateway, **fields: Any) -> list[float]:
    body = await post(gateway, "/score", **fields)
    assert [each["index"] for each in body["data"]] == list(range(len(body["data"])))
    return [each["score"] for each in body["data"]]


async def test_pairs_are_one_to_one_one_to_many_and_many_to_many() -> None:
    async with cross_encoder() as engine, running_gateway(engine) as gateway:
        one_to_many = await scores(gateway, text_1="Hi", text_2=DOCUMENTS)
        assert len(set(one_to_many)) > 1
        assert await scores(gateway, text_1="Hi", text_2=DOCUMENTS[0]) == one_to_many[:1]
        assert await scores(gateway, text_1=["Hi"] * 3, text_2=DOCUMENTS) == one_to_many
        for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
            assert await scores(gateway, **dict(zip(names, ("Hi", DOCUMENTS), strict=True))) == one_to_many
        wrapped = [{"text": DOCUMENTS[0]}, {"content": [{"type": "text", "text": DOCUMENTS[1]}]}, DOCUMENTS[2]]
        assert await scores(gateway, text_1={"text": "Hi"}, text_2=wrapped) == one_to_many
        assert [text_of(request) for request in engine.requests[:3]] == ["Hi" + text for text in DOCUMENTS]


async def test_a_cross_encoder_gets_the_start_of_the_second_segment() -> None:
    files = tokenizer_files()
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    tokenizer.post_processor = TemplateProcessing(
        single="<eos> $A <eos>", pair="<eos> $A <eos> $B:1 <eos>:1", special_tokens=[("<eos>", 0)]
    )
    files["tokenizer.json"] = tokenizer.to_str().encode()
    async with cross_encoder(files=files) as engine, running_gateway(engine) as gateway:
        await scores(gateway, text_1="Hi", text_2="there", use_activation=False)
        await scores(gateway, text_1="Hi there", text_2=DOCUMENTS[2], truncate_prompt_tokens=6)
        await scores(gateway, text_1="Hi there", text_2="one two three", max_tokens_per_query=1, max_tokens_per_doc=2)
        whole, cut, limited = engine.requests
        expected = tokenizer.encode("Hi", "there")
        assert prompt_ids(whole) == expected.ids
        assert whole.pooling_params.second_segment_start == expected.type_ids.index(1)
        assert whole.pooling_params.use_activation is False
        assert (len(prompt_ids(cut)), prompt_ids(cut)[-1]) == (6, 0)
        assert len(prompt_ids(limited)) == 3 + 1 + 2


async def test_scores_of_a_bi_encoder_are_cosines_of_its_embeddings() -> None:
    async with FakeEngine(pooling_tasks=(EMBED,)) as engine, running_gateway(engine) as gateway:
        answer = await gateway.openai.embeddings.create(model="fake", input=["Hi", *DOCUMENTS])
        query, *rest = [each.embedding for each in answer.data]
        expected = [sum(a * b for a, b in zip(query, each, strict=True)) for each in rest]
        engine.requests.clear()
        assert await scores(gateway, text_1="Hi", text_2=DOCUMENTS) == pytest.approx(expected)
        assert len(engine.requests) == 4
        assert await scores(gateway, text_1=["Hi"] * 3, text_2=DOCUMENTS) == pytest.approx(expected)
        assert await scores(gateway, text_1="one", text_2="one") == pytest.approx([1.0])


async def test_a_generative_reranker_is_asked_for_yes_or_no() -> None:
    files = tokenizer_files()
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens(["yes", "no"])
    files["tokenizer.json"] = tokenizer.to_str().encode()
    engine = FakeEngine(model_name="org/Qwen3-Reranker-0.6B", pooling_tasks=(TOKEN_LOGPROBS,), files=files)
    async with engine, running_gateway(engine) as gateway:
        (score,) = await scores(gateway, text_1="What?", text_2="A fox.", instruction="Find foxes")
        (raw,) = await scores(gateway, text_1="What?", text_2="A fox.", instruction="Find foxes", use_activation=False)
        whole = f"{QUESTION}<Instruct>: Find foxes\n<Query>: What?\n<Document>: A fox.{ANSWER}"
        first = engine.requests[0]
        text = tokenizer.decode(prompt_ids(first), skip_special_tokens=False)
        assert text == whole
        words = ("no", "yes")
        assert list(first.pooling_params.score_token_ids) == [tokenizer.token_to_id(word) for word in words]
        ((no, yes),) = [array("f", row).tolist() for row in pool(first)]
        assert score == pytest.approx(math.exp(yes) / (math.exp(yes) + math.exp(no)))
        assert raw == pytest.approx(yes - no)

        half = whole.index("<Document>")
        await scores(gateway, text_1=whole[:half], text_2=whole[half:])
        assert prompt_ids(engine.requests[-1]) == prompt_ids(first)
        kwargs = {"instruction": "Find foxes", "other": 1}
        response = await gateway.http.post(
            "/score", json={"text_1": "What?", "text_2": "A fox.", "chat_template_kwargs": kwargs}
        )
        assert prompt_ids(engine.requests[-1]) == prompt_ids(first)
        assert response.headers["x-proa-ignored-fields"] == "chat_template_kwargs.other"
        num_tokens = len(prompt_ids(first)) - 2
        await scores(
            gateway, text_1="What?", text_2="A fox.", instruction="Find foxes", truncate_prompt_tokens=num_tokens
        )
        text = tokenizer.decode(prompt_ids(engine.requests[-1]), skip_special_tokens=False)
        assert len(prompt_ids(engine.requests[-1])) == num_tokens
        assert text.endswith(ANSWER)


async def test_items_are_scored_by_the_probability_of_the_first_label_behind_the_query() -> None:
    tokenizer = byte_level_tokenizer()
    async with FakeEngine(pooling_tasks=(TOKEN_LOGPROBS,)) as engine, running_gateway(engine) as gateway:

        async def scored(**fields: Any) -> tuple[list[float], list[str]]:
            num_before = len(engine.requests)
            request = {"query": "Is it late? ", "items": ["yes", "no"], "label_token_ids": [7, 5], **fields}
            body = await post(gateway, "/generative_scoring", **request)
            assert body["id"].startswith("generative-scoring-")
            assert [each["index"] for each in body["data"]] == [0, 1]
            sent = engine.requests[num_before:]
            assert [list(each.pooling_params.score_token_ids) for each in sent] == [[7, 5]] * 2
            assert body["usage"]["prompt_tokens"] == sum(len(prompt_ids(each)) for each in sent)
            return [each["score"] for each in body["data"]], [text_of(each) for each in sent]

        share, texts = await scored()
        assert texts == ["Is it late? yes", "Is it late? no"]
        logprobs = [array("f", row).tolist() for each in engine.requests for row in pool(each)]
        assert share == pytest.approx([math.exp(one) / (math.exp(one) + math.exp(two)) for one, two in logprobs])
        assert (await scored(label_token_ids=[7, 5, 7]))[0] == share
        assert (await scored(apply_softmax=False))[0] == pytest.approx([math.exp(one) for one, _ in logprobs])
        assert (await scored(item_first=True))[1] == ["yesIs it late? ", "noIs it late? "]
        ids = [tokenizer.encode(text).ids for text in ("Is it late? ", "yes", "no")]
        assert (await scored(query=ids[0], items=ids[1:]))[1] == texts


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"label_token_ids": []}, "label_token_ids"),
        ({"label_token_ids": [10**9]}, "label_token_ids"),
        ({"items": []}, "items"),
        ({"items": [[10**9]]}, "items"),
        ({"query": ["one", "two"]}, None),
        ({"query": "word " * 300, "items": ["a"] * 2000}, "items"),
    ],
)
async def test_what_cannot_be_scored_by_a_label_is_refused(fields: dict[str, Any], param: str | None) -> None:
    engine = FakeEngine(pooling_tasks=(TOKEN_LOGPROBS,))
    async with engine, running_gateway(engine, max_pooling_tokens=100_000) as gateway:
        body = {"query": "Is it late? ", "items": ["yes"], "label_token_ids": [7], **fields}
        response = await gateway.http.post("/generative_scoring", json=body)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
        assert not engine.requests


async def test_documents_are_ranked_by_their_scores() -> None:
    async with cross_encoder() as engine, running_gateway(engine) as gateway:
        expected = await scores(gateway, text_1="Hi", text_2=DOCUMENTS)
        order = sorted(range(3), key=lambda index: -expected[index])
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            body = await post(gateway, path, model="fake", query="Hi", documents=DOCUMENTS)
            assert body["results"] == [
                {
                    "index": index,
                    "document": {"text": DOCUMENTS[index], "multi_modal": None},
                    "relevance_score": expected[index],
                }
                for index in order
            ]
        num_tokens = sum(len(prompt_ids(request)) for request in engine.requests[-3:])
        assert body["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
        assert body["meta"]["tokens"] == {"input_tokens": num_tokens}
        documents = [{"text": text} for text in DOCUMENTS]
        top = await post(gateway, "/rerank", query="Hi", documents=documents, top_n=2, return_documents=False)
        assert top["results"] == [{"index": index, "relevance_score": expected[index]} for index in order[:2]]


async def test_pairs_that_cannot_be_scored_are_refused_by_name() -> None:
    engine = FakeEngine(pooling_tasks=(CLASSIFY, TOKEN_LOGPROBS))
    async with cross_encoder(model_name="ranker") as ranker, engine, running_gateway(ranker, engine) as gateway:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"text_1": "a"}, "exactly one of: text_1 and text_2"),
            ({"text_1": "a", "text_2": "b", "queries": "c"}, "exactly one of"),
            ({"text_1": ["a", "b"], "text_2": "c"}, "one text on the first side"),
            ({"text_1": [], "text_2": "c"}, "text_1: must not be empty"),
            ({"text_1": "a", "text_2": [5]}, "text_2: must have strings"),
            ({"text_1": "a", "text_2": {"content": [{"type": "image_url"}]}}, "only text is supported"),
            ({"text_1": "a", "text_2": ["b"] * 5000}, "5001 inputs are above the limit"),
            ({"text_1": "a", "text_2": "b " * 9000}, "maximum context length"),
            ({"text_1": "a", "text_2": "b", "model": "fake"}, "has no scores of pairs: that needs one class"),
            ({"query": "a", "documents": []}, "documents: must not be empty"),
            ({"query": ["a", "b"], "documents": ["c"]}, "query: must have strings"),
            ({"query": "a", "documents": ["c"], "top_n": -1}, "top_n"),
            ({"query": "a", "documents": ["c"], "rank_fields": ["x"]}, "rank_fields is not supported"),
            ({"query": "a"}, "documents: Field required"),
        ]
        for fields, message in cases:
            path = "/rerank" if "query" in fields else "/score"
            response = await gateway.http.post(path, json={"model": "ranker", **fields})
            assert response.status_code == 400, (fields, response.text)
            assert message in response.json()["error"]["message"]


async def test_late_interaction_is_the_sum_of_the_closest_tokens() -> None:
    prefixes = {"query_prefix": "Q ", "document_prefix": "D "}
    files = tokenizer_files() | {"config_sentence_transformers.json": json.dumps(prefixes).encode()}
    tasks = (core_pb2.POOLING_TASK_TOKEN_EMBED,)
    async with FakeEngine(pooling_tasks=tasks, files=files) as engine, running_gateway(engine) as gateway:
        query, *documents = [token_rows(text) for text in ("Q one fox", *("D " + text for text in DOCUMENTS))]
        expected = [
            sum(max(sum(map(operator.mul, ours, theirs)) for theirs in each) for ours in query) for each in documents
        ]
        assert await scores(gateway, queries="one fox", documents=DOCUMENTS) == pytest.approx(expected, rel=1e-6)
        assert sorted(map(text_of, engine.requests)) == sorted(["Q one fox", *("D " + text for text in DOCUMENTS)])
        assert await scores(gateway, queries=["one fox"] * 3, documents=DOCUMENTS) == pytest.approx(expected, rel=1e-6)
        body = await post(gateway, "/rerank", query="one fox", documents=DOCUMENTS, top_n=1)
        assert body["results"][0]["relevance_score"] == pytest.approx(max(expected), rel=1e-6)


@pytest.mark.parametrize(
    ("fields", "start"),
    [({}, 4), ({"attend_to_expansion_tokens": True}, None), ({"do_query_expansion": False}, None)],
    ids=["no token attends to them", "all attend to them", "they are not expanded"],
)
async def test_queries_of_late_interaction_are_expanded_as_pylate_does(
    fields: dict[str, bool], start: int | None
) -> None:
    pylate = {"query_prefix": "Q ", "document_prefix": "D ", "query_length": 6, **fields}
    files = tokenizer_files() | {"config_sentence_transformers.json": json.dumps(pylate).encode()}
    files["tokenizer_config.json"] = json.dumps({"mask_token": "x", "eos_token": "<|endoftext|>"}).encode()
    tasks, encode = (core_pb2.POOLING_TASK_TOKEN_EMBED,), byte_level_tokenizer().encode
    async with FakeEngine(pooling_tasks=tasks, files=files) as engine, running_gateway(engine) as gateway:
        await scores(gateway, queries="one fox", documents=["a"])
        await scores(gateway, queries="one fox jumps over the dog", documents=["a"])
        queries = [each for each in engine.requests if not text_of(each).startswith("D ")]
        short, long = ([*array("I", each.prompt_token_ids)] for each in queries)
        whole = encode("Q one fox").ids
        expands = fields.get("do_query_expansion", True)
        assert short == (whole + encode("x").ids * (6 - len(whole)) if expands else whole)
        assert long == (encode("Q one fox jumps over the dog").ids[: 6 if expands else None])
        first = queries[0].pooling_params
        assert (first.expansion_start if first.HasField("expansion_start") else None) == start
        assert not queries[1].pooling_params.HasField("expansion_start")


def token_rows(text: str) -> list[list[float]]:
    request = core_pb2.EngineCoreRequest(prompt_token_ids=array("I", byte_level_tokenizer().encode(text).ids).tobytes())
    request.pooling_params.CopyFrom(core_pb2.PoolingParams(task=core_pb2.POOLING_TASK_TOKEN_EMBED, use_activation=True))
    return pool(request)
