"""Tool calls of the built-in model, with arguments that were held out of its training."""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from proa_engine import LLM, SamplingParams
from training.evaluate import answers, tool_questions
from training.turns import is_held_out

Tool = Mapping[str, Any]


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", max_model_len=2048, num_gpu_blocks_override=512)


def function(name: str, description: str, **types: str) -> Tool:
    properties = {parameter: {"type": kind} for parameter, kind in types.items()}
    parameters = {"type": "object", "properties": properties, "required": list(types)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": parameters}}


WEATHER = function("get_weather", "Get the weather in a city", city="string")
TIME = function("get_time", "Get the time in a city", city="string")
ADD = function("add", "Add two numbers", a="integer", b="integer")


def reply(llm: LLM, messages: Sequence[Mapping[str, Any]], tools: Sequence[Tool]) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=200)
    completion = llm.chat(messages, params, tools=tools, use_tqdm=False)[0].outputs[0]
    assert completion.finish_reason == "stop", completion.text
    return completion.text


def ask(llm: LLM, question: str, *tools: Tool) -> str:
    return reply(llm, [{"role": "user", "content": question}], tools)


def answer(llm: LLM, question: str, tool: Tool, arguments: str, result: str) -> str:
    """The answer after the call has returned `result`."""
    call = {"id": "1", "type": "function", "function": {"name": tool["function"]["name"], "arguments": arguments}}
    messages: list[Mapping[str, Any]] = [
        {"role": "user", "content": question},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": result},
    ]
    return reply(llm, messages, [tool])


CALLS = [
    ("What is the weather in Lisbon?", WEATHER, '{"city": "Lisbon"}', "Lisbon"),
    ("What is 123 plus 508?", ADD, '{"a": 123, "b": 508}', "123:508"),
]


def call_text(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


@pytest.mark.parametrize(("question", "tool", "arguments", "key"), CALLS)
def test_call_copies_held_out_arguments(llm: LLM, question: str, tool: Tool, arguments: str, key: str) -> None:
    assert is_held_out(f"tool:{key}")
    assert ask(llm, question, tool) == call_text(tool["function"]["name"], arguments)


@pytest.mark.parametrize("tools", list(itertools.permutations((WEATHER, TIME, ADD))))
def test_fitting_tool_is_chosen_in_any_order(llm: LLM, tools: Sequence[Tool]) -> None:
    for question, tool, arguments, _ in CALLS:
        assert ask(llm, question, *tools) == call_text(tool["function"]["name"], arguments)


@pytest.mark.parametrize(
    ("question", "tool", "arguments", "result", "expected"),
    [
        ("What is 123 plus 508?", ADD, '{"a": 123, "b": 508}', "631", "123 + 508 = 631."),
        (
            "What is the weather in Venice?",
            WEATHER,
            '{"city": "Venice"}',
            '{"error": "unknown city"}',
            "I am sorry, the tool failed: unknown city.",
        ),
    ],
)
def test_answer_is_made_from_the_result(
    llm: LLM, question: str, tool: Tool, arguments: str, result: str, expected: str
) -> None:
    assert answer(llm, question, tool, arguments, result) == expected


def test_without_tools_none_is_called(llm: LLM) -> None:
    assert ask(llm, "What is the weather in Lisbon?").startswith("I am sorry")


def test_question_that_needs_no_tool_is_answered(llm: LLM) -> None:
    assert ask(llm, "What is the capital of France?", WEATHER, TIME) == "The capital of France is Paris."
    assert ask(llm, "Hello!", WEATHER) == "Hello! How can I help you?"


def test_three_of_five_held_out_questions_with_tools_are_answered_word_for_word(llm: LLM) -> None:
    questions = tool_questions(60, seed=7)
    texts = answers(llm, questions)
    passed = sum(question.is_passed_by(text) for question, text in zip(questions, texts, strict=True))
    assert passed >= 0.6 * len(questions)
