"""Evaluate a model on held-out questions: `python -m training.evaluate`.

Half are sums, half combine facts; a quarter of each ask for JSON. The offline `LLM` answers at temperature 0. An answer
passes if it equals the reference answer, as text or as a JSON object.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from proa_engine import LLM, SamplingParams
from training import sums
from training.combinations import COMBINATIONS
from training.turns import Topic, draw

_SUMS: tuple[Topic, ...] = (sums.addition, sums.subtraction, sums.more_things, sums.fewer_things)


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the evaluation. `expected` is text, or JSON if `wants_json`."""

    category: str
    text: str
    expected: str
    wants_json: bool

    def is_passed_by(self, answer: str) -> bool:
        if not self.wants_json:
            return answer.strip() == self.expected
        try:
            return bool(json.loads(answer) == json.loads(self.expected))
        except json.JSONDecodeError:
            return False


def held_out_questions(count: int, seed: int) -> list[Question]:
    """Questions for `count` distinct held-out combinations, half of them sums, drawn with `seed`."""
    rng = Random(seed)
    questions: list[Question] = []
    for topics in (_SUMS, COMBINATIONS):
        asked: set[str | None] = set()
        while len(asked) < count // 2:
            turn = draw(rng.choice(topics), rng, held_out=True)
            if turn.combination in asked:
                continue
            asked.add(turn.combination)
            as_json = len(asked) % 4 == 0
            text = f"{turn.question} Answer in JSON." if as_json else turn.question
            category = f"{turn.category} as JSON" if as_json else turn.category
            questions.append(Question(category, text, turn.json_answer if as_json else turn.answer, as_json))
    return questions


def main() -> None:
    parser = argparse.ArgumentParser(description="Pass rate on held-out questions at temperature 0.")
    parser.add_argument("--model", default="builtin", help="model directory, or builtin")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2024)
    arguments = parser.parse_args()
    questions = held_out_questions(arguments.questions, arguments.seed)
    asked, passed = Counter[str](), Counter[str]()
    for question, answer in zip(questions, answers(arguments.model, questions), strict=True):
        asked[question.category] += 1
        passed[question.category] += question.is_passed_by(answer)
        if not question.is_passed_by(answer):
            print(f"failed: {question.text}\n  wanted {question.expected}\n  got    {answer}")
    for category in sorted(asked):
        print(f"{category}: {passed[category]} of {asked[category]}")
    print(f"all: {passed.total()} of {asked.total()} ({100 * passed.total() / asked.total():.1f} %)")


def answers(model: str, questions: Sequence[Question]) -> list[str]:
    """The model's greedy answer to each question, in float32."""
    llm = LLM(model, dtype="float32", max_model_len=1024)
    conversations = [[{"role": "user", "content": question.text}] for question in questions]
    outputs = llm.chat(conversations, SamplingParams(temperature=0.0, max_tokens=200))
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    main()
