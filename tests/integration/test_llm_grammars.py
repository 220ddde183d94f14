"""Structured outputs of the offline `LLM`, with the built-in model."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from proa_engine import LLM, CompletionOutput, SamplingParams, StructuredOutputsParams

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["a", "é", "</s>"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
FORMS: dict[str, dict[str, Any]] = {
    "json": {"json": SCHEMA},
    "regex": {"regex": r"\d{3}-[a-f]{2,5}"},
    "choice": {"choice": ["red", "reddish", "green"]},
    "grammar": {"grammar": 'root ::= "x" [0-9] [0-9] "y"'},
    "Lark": {"grammar": 'start: "x" /[0-9]{1,9}/ "y"'},
    "tag": {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "abc"}}},
}


@pytest.fixture(scope="module", params=[True, False], ids=["async", "sync"])
def llm(request: pytest.FixtureRequest) -> Iterator[LLM]:
    llm = LLM("builtin", dtype="float32", max_num_seqs=32, async_scheduling=request.param, num_gpu_blocks_override=512)
    yield llm
    llm.llm_engine.shutdown()


def constrained(seed: int = 0, form: dict[str, Any] = FORMS["json"], **fields: Any) -> SamplingParams:
    structured = StructuredOutputsParams(**form)
    return SamplingParams(**{"max_tokens": 200, "seed": seed, "structured_outputs": structured, **fields})


def generate(llm: LLM, *params: SamplingParams) -> list[CompletionOutput]:
    """The first choice of each."""
    return [output.outputs[0] for output in llm.generate(["Hello"] * len(params), params, use_tqdm=False)]


def check(form: str, text: str) -> None:
    if form == "json":
        value = json.loads(text)
        assert list(value) == ["name", "age", "tags"]
        assert len(value["name"]) <= 12
        assert 0 <= value["age"] <= 120
        assert len(value["tags"]) <= 3
        assert set(value["tags"]) <= {"a", "é", "</s>"}
    elif form == "choice":
        assert text in FORMS["choice"]["choice"]
    else:
        patterns = {"regex": r"\d{3}-[a-f]{2,5}", "grammar": r"x\d\dy", "Lark": r"x\d{1,9}y", "tag": "abc"}
        assert re.fullmatch(patterns[form], text)


@pytest.mark.parametrize("form", FORMS)
def test_outputs_match_beside_unconstrained_ones(llm: LLM, form: str) -> None:
    plain = SamplingParams(max_tokens=30, seed=1, ignore_eos=True)
    params = [each for seed in range(4) for each in (constrained(seed, FORMS[form], temperature=1.3), plain)]

    outputs = generate(llm, *params)

    for output in outputs[::2]:
        assert output.finish_reason == "stop"
        check(form, output.text)
    (alone,) = generate(llm, plain)
    assert all(output.token_ids == alone.token_ids for output in outputs[1::2])
    assert generate(llm, *params[::2]) == outputs[::2]


def test_last_token_of_a_complete_grammar_is_in_the_text_and_has_its_log_probability(llm: LLM) -> None:
    (request,) = llm.generate("Hello", constrained(seed=3, n=3, logprobs=2), use_tqdm=False)

    assert len({output.text for output in request.outputs}) > 1
    for output in request.outputs:
        check("json", output.text)
        assert output.text.endswith("}")
        assert output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids)
        assert output.token_ids[-1] in output.logprobs[-1]
        assert output.stop_reason is None


@pytest.mark.parametrize(
    ("form", "fields", "text", "finish_reason"),
    [
        ({"choice": ["a"]}, {}, "a", "stop"),
        ({"choice": [""]}, {}, "", "stop"),
        ({"choice": ["ab"]}, {"min_tokens": 20}, "ab", "stop"),
        ({"choice": ["ab"]}, {"ignore_eos": True}, "ab", "stop"),
        ({"regex": "x{1,30}"}, {"ignore_eos": True}, "x" * 30, "stop"),
        ({"regex": "x{40}"}, {"max_tokens": 1}, "x", "length"),
        ({"choice": ["one two three"]}, {"stop": ["two"]}, "one ", "stop"),
    ],
    ids=["one", "empty", "min_tokens", "ignore_eos", "ignore_eos until the last", "max_tokens", "stop string"],
)
def test_ends_of_constrained_outputs(
    llm: LLM, form: dict[str, Any], fields: dict[str, Any], text: str, finish_reason: str
) -> None:
    (output,) = generate(llm, constrained(0, form, **fields))

    assert output.finish_reason == finish_reason
    assert output.text == text if finish_reason == "stop" else output.text in text * 40


def test_choice_that_begins_another_can_be_either(llm: LLM) -> None:
    form = {"choice": ["a", "ab"]}

    texts = {output.text for output in generate(llm, *(constrained(seed, form, temperature=3.0) for seed in range(30)))}

    assert texts == {"a", "ab"}


def test_parameters_that_leave_no_token_end_with_an_error(llm: LLM) -> None:
    forbidden = constrained(0, {"choice": ["ab"]}, allowed_token_ids=[5])

    refused, good = generate(llm, forbidden, constrained())

    assert (refused.text, refused.finish_reason) == ("", "error")
    check("json", good.text)


def test_chat_works_with_structured_outputs(llm: LLM) -> None:
    (output,) = llm.chat([{"role": "user", "content": "Who?"}], constrained(), use_tqdm=False)

    check("json", output.outputs[0].text)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"json": {"type": "strin"}}, "strin"),
        ({"regex": "(?=a)"}, "look-around"),
        ({"grammar": "start: missing"}, "missing"),
        ({"choice": []}, "at least one"),
    ],
)
def test_constraint_that_cannot_be_held_is_refused_before_anything_runs(
    llm: LLM, form: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        llm.generate(["Hello", "Hello"], [constrained(), constrained(0, form)], use_tqdm=False)

    assert not llm.llm_engine.has_unfinished_requests()


def test_batch_of_many_different_schemas_is_not_refused(llm: LLM) -> None:
    forms = [{"json": {"const": f"value {index}"}} for index in range(150)]

    outputs = generate(llm, *(constrained(0, form) for form in forms))

    assert [json.loads(output.text) for output in outputs] == [form["json"]["const"] for form in forms]


def test_engine_without_a_tokenizer_refuses_structured_outputs() -> None:
    llm = LLM("builtin", dtype="float32", skip_tokenizer_init=True, max_model_len=64, num_gpu_blocks_override=64)
    prompt = {"prompt_token_ids": [5]}

    with pytest.raises(ValueError, match="structured_outputs need a tokenizer"):
        llm.generate([prompt], constrained(detokenize=False), use_tqdm=False)
    llm.llm_engine.shutdown()
