"""`/v1/decisions` and `/v1/systemone`: prompts, answers, what is sent to engines and what is refused."""

import base64
import json
from typing import Any

import pytest
from openai.types import Decision

from proa.engine.v1 import core_pb2
from proa.fit_messages import USERS
from support.chat_images import data_url, image_engine
from support.decisions import PREDICATE, TASKS, TEMPLATE, decide, deciding, files, refusal, text_of
from support.fake_engine import FakeEngine, prompt_ids
from support.gateway import running_gateway
from support.scrape import Scrape


async def test_openais_client_reads_all_answers() -> None:
    def probability(prompt: str, token: str) -> float:
        if "refuse" in prompt:
            return 0.001
        return {"A": 0.6, "B": 0.2}.get(token, 0.1)

    async with deciding(probability) as engine, running_gateway(engine) as gateway:
        choices = [{"value": "a"}, {"value": True, "description": "it is"}, {"value": "true"}]
        levels = [{"label": "low"}, {"label": "high", "description": "very"}, {"label": "top"}]
        decision = await decide(
            gateway,
            {"type": "predicate", "name": "first", "instructions": "Is it late?"},
            {"type": "choice", "instructions": "Which?", "choices": choices},
            {"type": "score", "name": "third", "instructions": "How much?", "levels": levels},
            {"type": "predicate", "name": "fourth", "instructions": "Will you refuse?"},
        )
        predicate, choice, score, refused = [answer.to_dict() for answer in decision.answers]
        assert decision.model == "fake"
        assert predicate == {"type": "predicate", "name": "first", "probability": pytest.approx(0.5)}
        assert choice == {
            "type": "choice",
            "name": None,
            "choice": "a",
            "confidence": pytest.approx(0.6),
            "probabilities": [
                {"value": "a", "probability": pytest.approx(6 / 9)},
                {"value": True, "probability": pytest.approx(2 / 9)},
                {"value": "true", "probability": pytest.approx(1 / 9)},
            ],
        }
        assert score == {
            "type": "score",
            "name": "third",
            "score": pytest.approx(4 / 9),
            "confidence": pytest.approx(0.6),
            "probabilities": [
                {"value": 0, "label": "low", "probability": pytest.approx(6 / 9)},
                {"value": 1, "label": "high", "probability": pytest.approx(2 / 9)},
                {"value": 2, "label": "top", "probability": pytest.approx(1 / 9)},
            ],
        }
        assert refused == {"type": "refusal", "name": "fourth"}
        Decision.model_validate(decision.to_dict(), strict=True)


async def test_the_input_is_a_request_of_its_own_and_counts_once() -> None:
    async with deciding() as engine, running_gateway(engine) as gateway:
        asked = [{"type": "predicate", "instructions": f"Is it {hour}?"} for hour in ("one", "two", "three")]
        decision = await decide(gateway, *asked, input="The quick brown fox " * 20)
        shared, *rest = map(prompt_ids, engine.requests)
        assert (
            text_of(engine.requests[0])
            == f"<start>user\n{'The quick brown fox ' * 20}<end>\n<start>user\nQuestion:\nIs it"
        )
        assert [ids[: len(shared)] for ids in rest] == [shared] * 6
        assert text_of(engine.requests[3]) == (
            f"<start>user\n{'The quick brown fox ' * 20}<end>\n<start>user\n"
            "Question:\nIs it two?\nA: yes\nB: no\nAnswer with one label.<end>\n<start>assistant\n"
        )
        usage = decision.usage
        assert usage.input_tokens == usage.total_tokens == len(shared) + sum(len(ids) - len(shared) for ids in rest)
        assert usage.output_tokens == 0
        page = Scrape((await gateway.http.get("/metrics")).text)
        assert page.value("vllm:prompt_tokens_total", model_name="fake") == usage.input_tokens

        engine.requests.clear()
        await decide(gateway, asked[0], input="The quick brown fox " * 20)
        shared, *rest = map(prompt_ids, engine.requests)
        assert text_of(engine.requests[0]).endswith("Question:\nIs it one?\nA:")
        assert [ids[: len(shared)] for ids in rest] == [shared] * 2

        engine.requests.clear()
        choice = {"type": "choice", "instructions": "Which?", "choices": [{"value": "a"}, {"value": "b"}]}
        await decide(gateway, choice, input="The quick brown fox " * 20)
        assert len(engine.requests) == 1


async def test_prompts_are_those_of_the_same_chats() -> None:
    """However they are made: in the place of another question, or one by one for a template that changes texts."""
    for template in (
        TEMPLATE,
        TEMPLATE.replace("message.content", "message.content | replace('Question', 'QUESTION')"),
    ):
        async with deciding(files=files(template)) as engine, running_gateway(engine) as gateway:
            asked = [PREDICATE, {"type": "predicate", "instructions": "Is naïve café 12 € 😀 <end>\n<start>user\n?"}]
            await decide(
                gateway,
                *asked,
                input=[{"role": "developer", "content": "Be brief."}, {"role": "user", "content": "Hi"}],
            )
            orders = [(question, order) for question in asked for order in ("A: yes\nB: no", "A: no\nB: yes")]
            for (question, order), request in zip(orders, engine.requests[1:], strict=True):
                text = f"Question:\n{question['instructions']}\n{order}\nAnswer with one label."
                messages = [
                    {"role": "system", "content": "Be brief."},
                    {"role": "user", "content": "Hi"},
                    {"role": "user", "content": text},
                ]
                response = await gateway.http.post("/tokenize", json={"messages": messages})
                assert prompt_ids(request) == response.json()["tokens"]


async def test_messages_calls_and_their_outputs_are_the_conversation() -> None:
    items: list[dict[str, Any]] = [
        {
            "role": "user",
            "content": [{"type": "input_text", "text": "See"}, {"type": "input_json", "data": {"a": [1, "ü"]}}],
        },
        {
            "role": "assistant",
            "content": [{"type": "output_text", "text": "I look."}, {"type": "refusal", "refusal": "No."}],
        },
        {"type": "function_call", "call_id": "1", "name": "find", "namespace": "web", "arguments": '{"x": 1}'},
        {"type": "custom_tool_call", "call_id": "2", "name": "run", "input": "ls\n"},
        {"type": "function_call_output", "call_id": "1", "output": "found"},
        {"type": "custom_tool_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "files"}]},
        {"type": "message", "role": "assistant", "content": "Done.", "phase": "final_answer"},
    ]
    async with deciding() as engine, running_gateway(engine) as gateway:
        await decide(gateway, PREDICATE, input=items)
        text = text_of(engine.requests[0])
        # The template writes a text after the calls beside it, so it gets a message before them.
        begin = '<start>user\nSee\n{"a":[1,"ü"]}<end>\n<start>assistant\nI look.\nNo.<end>\n<start>assistant\n'
        assert text.startswith(f"{begin}[")
        sent, _ = json.JSONDecoder().raw_decode(text.removeprefix(begin))
        assert [each["id"] for each in sent] == ["1", "2"]
        assert [each["function"] for each in sent] == [
            {"name": "web__find", "arguments": {"x": 1}},
            {"name": "run", "arguments": {"input": "ls\n"}},
        ]
        assert (
            "<start>tool\nfound<end>\n<start>tool\nfiles<end>\n<start>assistant\nDone.<end>\n<start>user\nQuestion"
            in text
        )


async def test_many_options_have_numbers_that_are_read_digit_by_digit() -> None:
    """Option 17 of 40 is nearly certain: of the first digits only 1 can be followed."""

    def probability(prompt: str, token: str) -> float:
        wanted = {"assistant\n": "1", "assistant\n1": "7"}[prompt[prompt.rindex("<start>") + len("<start>") :]]
        return 0.9 if token == wanted else 1e-6

    async with deciding(probability) as engine, running_gateway(engine) as gateway:
        choices = [{"value": f"option {number}"} for number in range(1, 41)]
        decision = await decide(gateway, {"type": "choice", "instructions": "Which?", "choices": choices})
        (answer,) = decision.answers
        assert answer.type == "choice"
        assert answer.choice == "option 17"
        assert answer.confidence == pytest.approx(0.81, rel=1e-3)
        assert sum(each.probability for each in answer.probabilities) == pytest.approx(1)
        assert "\n01: option 1\n02: option 2\n" in text_of(engine.requests[0])
        assert [len(each.pooling_params.score_token_ids) for each in engine.requests] == [6, 9]  # 12 is a token


async def test_reasoning_is_off_or_closed() -> None:
    switch = TEMPLATE.replace("{{ opening }}", "{% if enable_thinking %}<think>{% else %}<think></think>{% endif %}")
    always = TEMPLATE.replace("{{ opening }}", "<think>\n") + '{# </think> <tool_call> "arguments" #}'
    cases = [
        (switch, "<think></think>"),
        (always, "<think>\n</think>\n\n"),
        (always.replace("<think>\n", "<think>"), "<think></think>"),
    ]
    for template, ending in cases:
        async with deciding(files=files(template)) as engine, running_gateway(engine) as gateway:
            await decide(gateway, PREDICATE, PREDICATE)
            assert text_of(engine.requests[-1]).endswith(f"<start>assistant\n{ending}")


async def test_what_was_changed_for_the_template_is_named_once() -> None:
    """The template wants answers between the messages of the user, which the question is one of."""
    alternating = (
        "{% for message in messages %}{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('roles must alternate') }}{% endif %}{% endfor %}"
    )
    async with deciding(files=files(alternating + TEMPLATE)) as engine, running_gateway(engine) as gateway:
        body = {"model": "fake", "input": "Hello", "questions": [PREDICATE, PREDICATE]}
        response = await gateway.http.post("/v1/decisions", json=body)
        assert response.status_code == 200
        assert response.headers["x-proa-warnings"] == USERS
        assert text_of(engine.requests[-1]).startswith("<start>user\nHello\n\nQuestion")


async def test_systemone_answers_by_id() -> None:
    async with deciding() as engine, running_gateway(engine) as gateway:
        questions = {
            "late": {"type": "noul", "instructions": {"question": "Is it?"}, "criteria": {"true": "after ten"}},
            "team": {
                "type": "choice",
                "instructions": "Who?",
                "criteria": {"billing": "money", "other": None, "third": {"a": 1}},
            },
            "urgency": {"type": "score", "criteria": ["can wait", ["today"]]},
        }
        body = {"model": "fake", "state": {"subject": "Hi", "lines": [1, None]}, "questions": questions}
        response = await gateway.http.post("/v1/systemone", json=body)
        assert response.status_code == 200, response.text
        answers = response.json()["answers"]
        assert response.json()["model"] == "fake"
        assert answers["late"] == {"type": "noul", "noul": pytest.approx(0.5)}
        assert answers["team"] == {
            "type": "choice",
            "choice": "billing",
            "confidence": pytest.approx(0.6),
            "probabilities": {
                "billing": pytest.approx(0.75),
                "other": pytest.approx(1 / 8),
                "third": pytest.approx(1 / 8),
            },
        }
        assert answers["urgency"] == {
            "type": "score",
            "score": pytest.approx(1 / 7),
            "confidence": pytest.approx(0.6),
            "legend": {"0": "can wait", "1": ["today"]},
            "probabilities": {"0": pytest.approx(6 / 7), "1": pytest.approx(1 / 7)},
        }
        usage = response.json()["usage"]
        assert (usage["output_tokens"], usage["input_tokens"] > 0) == (0, True)
        _, late, reverse, team, urgency = map(text_of, engine.requests)
        assert (
            '<start>user\n{"subject":"Hi","lines":[1,null]}<end>\n<start>user\nQuestion:\n{"question":"Is it?"}\n'
            in late
        )
        assert "\nA: yes: after ten\nB: no\n" in late
        assert late.replace("A: yes: after ten\nB: no\n", "A: no\nB: yes: after ten\n") == reverse
        assert 'Who?\nA: billing: money\nB: other\nC: third: {"a":1}\n' in team
        assert 'Question:\nA: can wait\nB: ["today"]\n' in urgency


async def test_the_same_question_has_the_same_answer_in_both_apis() -> None:
    async with deciding() as engine, running_gateway(engine) as gateway:
        decision = await decide(gateway, PREDICATE, input="Hello")
        body = {"state": "Hello", "questions": {"q": {"type": "noul", "instructions": PREDICATE["instructions"]}}}
        answer = (await gateway.http.post("/v1/systemone", json=body)).json()["answers"]["q"]
        assert answer["noul"] == decision.answers[0].probability  # type: ignore
        prompts = [prompt_ids(request) for request in engine.requests]
        assert prompts[: len(prompts) // 2] == prompts[len(prompts) // 2 :]


async def test_fields_about_caches_and_users_have_no_effect() -> None:
    async with deciding() as engine, running_gateway(engine) as gateway:
        part = {"type": "input_text", "text": "Hi", "prompt_cache_breakpoint": {"mode": "explicit"}}
        response = await gateway.http.post(
            "/v1/decisions",
            json={
                "input": [{"role": "user", "content": [part]}],
                "questions": [PREDICATE],
                "prompt_cache_key": "key",
                "prompt_cache_options": {"mode": "explicit", "ttl": "30m"},
                "safety_identifier": "someone",
                "other": 1,
            },
        )
        assert response.status_code == 200, response.text
        assert response.headers["x-proa-ignored-fields"] == "other"


async def test_what_is_refused() -> None:
    image = {"type": "input_image", "image_url": "data:image/png;base64," + base64.b64encode(b"x").decode()}
    two = [{"value": "a"}, {"value": "a"}]
    async with deciding() as engine, running_gateway(engine, max_pooling_tokens=3000) as gateway:
        cases: list[tuple[dict[str, Any], str, str]] = [
            ({"input": []}, "input", "at least 1 item"),
            ({"input": 5}, "input", "must be a string or a list of items"),
            ({"input": [{"type": "reasoning"}]}, "input[0]", "has the type 'reasoning'"),
            ({"input": [{"role": "system", "content": [image]}]}, "input[0].message", "'input_image', which a message"),
            (
                {"input": [{"role": "user", "content": [image]}]},
                "input[0].content[0].image_url",
                "does not read images",
            ),
            ({"input": [{"type": "function_call_output", "call_id": "x", "output": ""}]}, "input", "no call before it"),
            ({"input": "word " * 50_000}, "input", "maximum context length"),
            ({"input": "word " * 500, "questions": [PREDICATE] * 8}, "input", "over 3000 tokens in all"),
            ({"questions": []}, "questions", "at least 1 item"),
            ({"questions": [PREDICATE] * 401}, "questions", "at most 400 items"),
            ({"questions": [{**PREDICATE, "text": "x"}]}, "questions[0].text", "Extra inputs"),
            ({"questions": [{"type": "predicate"}]}, "questions[0].instructions", "Field required"),
            ({"questions": [{"type": "vote", "instructions": "x"}]}, "questions[0]", "has the type 'vote'"),
            (
                {"questions": [{"type": "predicate", "instructions": [image]}]},
                "questions[0].instructions[0].image_url",
                "images",
            ),
            (
                {"questions": [{"type": "choice", "instructions": "x", "choices": two}]},
                "questions[0].choices",
                "different",
            ),
            (
                {"questions": [{"type": "choice", "instructions": "x", "choices": two[:1]}]},
                "questions[0].choices",
                "at least 2",
            ),
            (
                {
                    "questions": [
                        {"type": "choice", "instructions": "x", "choices": [{"value": str(n)} for n in range(256)]}
                    ]
                },
                "questions[0].choices",
                "at most 255",
            ),
            (
                {"questions": [{"type": "score", "instructions": "x", "levels": [{"label": "a"}]}]},
                "questions[0].levels",
                "at least 2",
            ),
            ({"stream": True}, "stream", "there is one response"),
        ]
        for fields, param, message in cases:
            status, found, text = await refusal(gateway, **fields)
            assert (status, found) == (400, param), (fields, text)
            assert message in text
        assert engine.requests == []


async def test_a_question_that_is_too_long_is_named() -> None:
    """Alone, whether it is the first or not, and with the input."""
    noul = {"type": "noul", "instructions": "Is it late?"}
    async with deciding(max_model_len=400) as engine, running_gateway(engine) as gateway:
        for index in range(4):
            questions = [PREDICATE] * 4
            questions[index] = {"type": "predicate", "instructions": "word " * 20_000}
            status, param, message = await refusal(gateway, questions=questions)
            assert (status, param) == (400, f"questions[{index}]")
            assert "This model's maximum context length is 400 tokens" in message
            questions[index] = {"type": "predicate", "instructions": "?! " * 130}
            status, param, message = await refusal(gateway, questions=questions)
            assert (status, param) == (400, "input")
            assert f"the prompt of questions[{index}] has" in message
        for words, param in ((20_000, "questions.late"), (130, "state")):
            asked = {"early": noul, "late": {"type": "noul", "instructions": "?! " * words}}
            status, found, message = await refusal(gateway, "/v1/systemone", state="Hello", questions=asked)
            assert (status, found) == (400, param)
            assert words == 20_000 or "the prompt of questions.late has" in message
        assert engine.requests == []


@pytest.mark.parametrize("field", ["joint", "audio", "videos", "assets"])
async def test_systemone_refuses_what_it_cannot_read(field: str) -> None:
    body = {"state": "x", "questions": {"q": {"type": "noul", "instructions": "x"}}}
    async with deciding() as engine, running_gateway(engine) as gateway:
        status, param, _ = await refusal(gateway, "/v1/systemone", **body, **{field: True})
        assert (status, param) == (400, field)
        response = await gateway.http.post("/v1/systemone", json={**body, field: None})
        assert response.status_code == 200


async def test_systemone_refuses_questions_that_ask_nothing() -> None:
    async with deciding() as engine, running_gateway(engine) as gateway:
        cases: list[tuple[dict[str, Any], str]] = [
            ({"state": 5}, "state"),
            ({"questions": {}}, "questions"),
            ({"questions": {"q": {"type": "noul"}}}, "questions.q.noul"),
            ({"questions": {"q": {"type": "box", "instructions": "x"}}}, "questions.q"),
            ({"questions": {"q": {"type": "choice", "criteria": {}}}}, "questions.q.criteria"),
            (
                {"questions": {"q": {"type": "choice", "criteria": dict.fromkeys(map(str, range(256)))}}},
                "questions.q.criteria",
            ),
            ({"questions": {str(n): {"type": "noul", "instructions": "x"} for n in range(401)}}, "questions"),
            ({"questions": {"q": {"type": "score", "criteria": ["x"], "instruction": "x"}}}, "questions.q.instruction"),
        ]
        for fields, param in cases:
            body = {"state": "x", "questions": {"q": {"type": "noul", "instructions": "x"}}, **fields}
            assert (await refusal(gateway, "/v1/systemone", **body))[:2] == (400, param)


def nested(depth: int) -> Any:
    return {"a": nested(depth - 1)} if depth else {}


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (nested(31), ""),
        (nested(32), "more than 32 levels"),
        ([{"a": 1}], ""),
        ([[1]], "an object or an array of objects"),
        ({str(number): number for number in range(10_000)}, ""),
        ({str(number): number for number in range(10_001)}, "more than 10000 values"),
        ({"a": "x" * (256 * 1024 - 8)}, "context length"),
        ({"a": "x" * (256 * 1024 - 7)}, "more than 262144 bytes"),
    ],
)
async def test_json_parts_have_limits(data: Any, message: str) -> None:
    async with deciding(max_model_len=200_000) as engine, running_gateway(engine) as gateway:
        items = [{"role": "user", "content": [{"type": "input_json", "data": data}]}]
        response = await gateway.http.post("/v1/decisions", json={"input": items, "questions": [PREDICATE]})
        if message:
            assert response.status_code == 400
            assert message in response.json()["error"]["message"]
        else:
            assert response.status_code == 200, response.text


async def test_images_of_the_input_are_shared_and_those_of_a_question_are_its_own() -> None:
    def image(seed: int) -> dict[str, Any]:
        return {"type": "input_image", "image_url": data_url(seed)}

    async with image_engine(pooling_tasks=TASKS) as engine, running_gateway(engine) as gateway:
        input = [{"role": "user", "content": [{"type": "input_text", "text": "See: "}, image(1)]}]
        asked = [{"type": "input_text", "text": "Is it the same?"}]
        await decide(
            gateway, PREDICATE, {"type": "predicate", "instructions": [*asked, image(2)]}, PREDICATE, input=input
        )
        *requests, own, reverse = sorted(engine.requests, key=lambda request: len(request.images))
        first = requests[0].images[0]
        assert [[image.hash for image in request.images] for request in requests] == [[first.hash]] * 5
        places = [[(image.hash, image.offset) for image in request.images] for request in (own, reverse)]
        assert places[0] == places[1]
        assert len({first.hash, *(image.hash for image in own.images)}) == 2
        assert {request.images[0].offset for request in engine.requests} == {first.offset}
        for each in own.images:  # where the image's tokens are
            ids = prompt_ids(own)[each.offset : each.offset + each.num_tokens]
            assert len(set(ids)) == 1

        engine.requests.clear()
        body = {"state": "See", "images": [data_url(1), {"url": data_url(3)}]}
        questions = {"q": {"type": "noul", "instructions": "Is it?", "images": [{"image_url": {"url": data_url(2)}}]}}
        response = await gateway.http.post("/v1/systemone", json={**body, "questions": questions})
        assert response.status_code == 200, response.text
        hashes = [[image.hash for image in request.images] for request in engine.requests]
        assert [each[::2] for each in hashes] == [[first.hash, own.images[1].hash]] * 3


async def test_a_model_without_log_probabilities_is_refused() -> None:
    tasks = (core_pb2.POOLING_TASK_EMBED,)
    async with FakeEngine(pooling_tasks=tasks, pooling_only=True) as engine, running_gateway(engine) as gateway:
        response = await gateway.http.post("/v1/decisions", json={"input": "x", "questions": [PREDICATE]})
        assert response.status_code == 400
        assert response.json()["error"]["code"] == "unsupported_task"
