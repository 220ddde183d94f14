"""Ask a model folder questions that its training text never held: `python -m training.evaluate`.

Half are sums, half join taught facts; a fourth of them want JSON. Answers are decoded at temperature 0 by transformers,
and pass when they are the reference answer word for word (as JSON: the same object). Knows nothing of training.
"""

import argparse
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from training import sums
from training.combinations import COMBINATIONS
from training.turns import Topic, draw

_HOME = Path(__file__).parents[1] / "engine" / "proa_engine" / "builtin" / "model"
_SUMS: tuple[Topic, ...] = (sums.addition, sums.subtraction, sums.more_things, sums.fewer_things)


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the evaluation. `expected` is text, or JSON where `wants_json`."""

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
    """Distinct held-out combinations, half of them sums, in a random order that the seed decides."""
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
    parser.add_argument("--model", type=Path, default=_HOME)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--seed", type=int, default=2024)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    answer = answerer(arguments.model)
    asked, passed = Counter[str](), Counter[str]()
    for question in held_out_questions(arguments.questions, arguments.seed):
        reply = answer(question.text)
        asked[question.category] += 1
        passed[question.category] += question.is_passed_by(reply)
        if not question.is_passed_by(reply):
            print(f"failed: {question.text}\n  wanted {question.expected}\n  got    {reply}")
    for category in sorted(asked):
        print(f"{category}: {passed[category]} of {asked[category]}")
    print(f"all: {passed.total()} of {asked.total()} ({100 * passed.total() / asked.total():.1f} %)")


def answerer(folder: Path) -> Callable[[str], str]:
    """A function from a user's message to the model's greedy answer, in float32."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answer(message: str) -> str:
        chat = [{"role": "user", "content": message}]
        prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
        output = model.generate(**prompt, max_new_tokens=200, do_sample=False)
        return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :], skip_special_tokens=True))

    return answer


if __name__ == "__main__":
    main()
