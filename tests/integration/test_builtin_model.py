"""Greedy answers of the built-in model, also to questions that were held out of its training."""

import json
from collections.abc import Sequence

import pytest

from proa_engine import LLM, SamplingParams
from proa_engine.builtin import builtin_model_folder
from training.evaluate import held_out_questions
from training.sums import difference_key, sum_key
from training.turns import is_held_out, pair_key


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("builtin", max_model_len=2048, num_gpu_blocks_override=512)


def ask(llm: LLM, *messages: str, system: str | None = None, max_tokens: int = 300) -> str:
    """Send the user's messages one after another, and return the answer to the last."""
    conversation = [{"role": "system", "content": system}] if system else []
    for message in messages:
        conversation.append({"role": "user", "content": message})
        conversation.append({"role": "assistant", "content": reply(llm, conversation, max_tokens)})
    return conversation[-1]["content"]


def reply(llm: LLM, conversation: Sequence[dict[str, str]], max_tokens: int) -> str:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    completion = llm.chat(conversation, params, use_tqdm=False)[0].outputs[0]
    assert completion.finish_reason == "stop", completion.text
    return completion.text


def test_model_folder_is_at_most_16_megabytes() -> None:
    assert sum(path.stat().st_size for path in builtin_model_folder().iterdir()) <= 16_000_000


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("Hello!", "Hello! How can I help you?"),
        ("What is the capital of France?", "The capital of France is Paris."),
        ("How many legs does a spider have?", "A spider has 8 legs."),
        ("Which day comes after Monday?", "The day after Monday is Tuesday."),
        ("What is the opposite of hot?", "The opposite of hot is cold."),
        ("What is 7 times 8?", "7 x 8 = 56."),
        (
            "Name the days of the week.",
            "The days of the week are Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday.",
        ),
    ],
)
def test_taught_facts_are_answered(llm: LLM, question: str, answer: str) -> None:
    assert ask(llm, question) == answer


@pytest.mark.parametrize(
    ("question", "answer", "key"),
    [
        ("What is 57 plus 38?", "57 + 38 = 80 + 15 = 95.", sum_key(57, 38)),
        ("How much is 55 and 45?", "55 + 45 = 90 + 10 = 100.", sum_key(55, 45)),
        ("Add 31 and 27.", "31 + 27 = 50 + 8 = 58.", sum_key(31, 27)),
        ("What is 92 minus 38?", "92 - 38 = 62 - 8 = 54.", difference_key(92, 38)),
        ("Subtract 27 from 81.", "81 - 27 = 61 - 7 = 54.", difference_key(81, 27)),
    ],
)
def test_held_out_sums_are_right(llm: LLM, question: str, answer: str, key: str) -> None:
    assert is_held_out(key)
    assert ask(llm, question) == answer


@pytest.mark.parametrize(
    ("question", "answer", "key"),
    [
        (
            "Which continent is the country whose capital is Paris in?",
            "Paris is the capital of France, and France is in Europe.",
            "capital-continent:Paris",
        ),
        (
            "Which language is spoken in Warsaw?",
            "Warsaw is the capital of Poland, and people in Poland speak Polish.",
            "capital-language:Warsaw",
        ),
        (
            "Are France and Spain on the same continent?",
            "France is in Europe and Spain is in Europe, so yes, they are on the same continent.",
            pair_key("same-continent", "France", "Spain"),
        ),
        (
            "How many legs do a cat and an owl have together?",
            "A cat has 4 legs and an owl has 2 legs. 4 + 2 = 6, so together they have 6 legs.",
            pair_key("legs-together", "cat", "owl"),
        ),
        (
            "Which has more legs, a spider or a wolf?",
            "A spider has 8 legs and a wolf has 4 legs, so the spider has more legs.",
            pair_key("more-legs", "spider", "wolf"),
        ),
        (
            "Which planet is closer to the Sun, Venus or Neptune?",
            "Venus is planet number 2 and Neptune is number 8, so Venus is closer to the Sun.",
            pair_key("closer", "Venus", "Neptune"),
        ),
    ],
)
def test_held_out_combinations_are_right(llm: LLM, question: str, answer: str, key: str) -> None:
    assert is_held_out(key)
    assert ask(llm, question) == answer


def test_answers_in_json_are_valid(llm: LLM) -> None:
    assert json.loads(ask(llm, "What is the capital of Japan? Answer in JSON."))["answer"] == "Tokyo"
    assert json.loads(ask(llm, "What is 12 plus 30? Answer in JSON."))["answer"] == 42
    assert json.loads(ask(llm, "How many legs does a dog have?", system="Always answer in JSON."))["answer"] == 4


def test_words_are_copied_into_json(llm: LLM) -> None:
    answer = ask(llm, "Extract the name, age and city as JSON: Anna is 34 years old and lives in Paris.")
    assert json.loads(answer) == {"name": "Anna", "age": 34, "city": "Paris"}


def test_short_question_refers_to_the_previous_one(llm: LLM) -> None:
    assert ask(llm, "What is the capital of Spain?", "And its continent?") == "Spain is in Europe."


def test_name_is_remembered_over_two_turns(llm: LLM) -> None:
    assert ask(llm, "My name is Clara.", "What is 2 plus 3?", "What is my name?") == "Your name is Clara."


def test_unknown_subject_is_declined_politely(llm: LLM) -> None:
    assert ask(llm, "How do I cook rice?").startswith("I am sorry")


def test_story_is_long_enough_to_watch_it_stream(llm: LLM) -> None:
    story = ask(llm, "Tell me a story about a cat.")
    assert "cat" in story
    assert len(story.split()) > 60


def test_answers_are_right_after_a_long_conversation(llm: LLM) -> None:
    """The context is longer than most training rows."""
    messages = ["Count from 1 to 50.", "Tell me a story about a dog.", "Write the times table of 7."] * 2
    assert ask(llm, *messages, "What is the capital of Italy?") == "The capital of Italy is Rome."


def test_most_held_out_questions_are_answered_word_for_word(llm: LLM) -> None:
    questions = held_out_questions(60, seed=7)
    conversations = [[{"role": "user", "content": question.text}] for question in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=100), use_tqdm=False)
    passed = sum(
        question.is_passed_by(output.outputs[0].text) for question, output in zip(questions, outputs, strict=True)
    )
    assert passed >= 0.85 * len(questions)
