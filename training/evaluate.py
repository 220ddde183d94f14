"""Evaluate a model on held-out questions: `python -m training.evaluate`.

Half of the questions without tools are sums, half combine facts; a quarter of each ask for JSON. The questions with
tools copy held-out words and numbers into calls, answer from results, or need none of the tools. The offline `LLM`
answers at temperature 0. An answer passes if it equals the reference answer, as text or as a JSON object.
"""

import argparse
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from random import Random

from proa_engine import LLM, SamplingParams
from proa_engine.tokenizer import ChatOptions
from training import sums
from training.combinations import COMBINATIONS
from training.tool_conversations import draw_toolbox, fitting_request, needless_turn, unfit_turn
from training.tools import Call, Tool, calls_text
from training.turns import Exchange, Topic, Turn, draw

_SUMS: tuple[Topic, ...] = (sums.addition, sums.subtraction, sums.more_things, sums.fewer_things)


@dataclass(frozen=True, slots=True)
class Question:
    """One question of the evaluation. `expected` is text, or JSON if `wants_json`.

    With `tools`, `expected` may be calls. With `calls`, they have returned `results`, which `expected` answers from.
    """

    category: str
    text: str
    expected: str
    wants_json: bool = False
    tools: tuple[Tool, ...] = ()
    calls: tuple[Call, ...] = ()
    results: tuple[str, ...] = ()

    @property
    def messages(self) -> list[dict[str, object]]:
        messages: list[dict[str, object]] = [{"role": "user", "content": self.text}]
        if self.calls:
            calls = [{"type": "function", "function": call.function} for call in self.calls]
            messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        return messages + [{"role": "tool", "content": result} for result in self.results]

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


def tool_questions(count: int, seed: int) -> list[Question]:
    """Questions for `count` distinct held-out combinations, with one to three tools each, drawn with `seed`."""
    rng = Random(seed)
    questions: dict[str | None, Question] = {}
    while len(questions) < count:
        toolbox = draw_toolbox(rng)
        tools, chance = tuple(toolbox.values()), rng.random()
        if chance < 0.8:
            request = draw(partial(fitting_request, toolbox=toolbox), rng, held_out=True)
            questions[request.combination] = _request_question(rng, request.exchange, tools)
        else:
            topic = unfit_turn if chance < 0.9 else partial(needless_turn, plain_turn=_combined_facts)
            turn = draw(partial(topic, toolbox=toolbox), rng, held_out=True)
            category = "no tool fits" if chance < 0.9 else "no tool is needed"
            questions[turn.combination] = Question(category, turn.question, turn.answer, tools=tools)
    return list(questions.values())


def _combined_facts(rng: Random) -> Turn:
    return rng.choice(COMBINATIONS)(rng)


def _request_question(rng: Random, exchange: Exchange, tools: tuple[Tool, ...]) -> Question:
    """Asks for the calls, or for the answer from their results."""
    calls, text = exchange.calls, exchange.question
    if rng.random() < 0.35:
        return Question("answers from results", text, exchange.answer, False, tools, calls, exchange.results)
    category = f"calls with {len(tools)} tools offered"
    return Question(category, text, calls_text(calls), tools=tools)


def main() -> None:
    parser = argparse.ArgumentParser(description="Pass rate on held-out questions at temperature 0.")
    parser.add_argument("--model", default="builtin", help="model directory, or builtin")
    parser.add_argument("--questions", type=int, default=200, help="without tools, and as many with tools")
    parser.add_argument("--seed", type=int, default=2024)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype="float32", max_model_len=1024)
    for name, draw_questions in (("without tools", held_out_questions), ("with tools", tool_questions)):
        report(llm, name, draw_questions(arguments.questions, arguments.seed))


def report(llm: LLM, name: str, questions: Sequence[Question]) -> None:
    """Print the failed questions and the pass rates by category."""
    asked, passed = Counter[str](), Counter[str]()
    for question, answer in zip(questions, answers(llm, questions), strict=True):
        asked[question.category] += 1
        passed[question.category] += question.is_passed_by(answer)
        if not question.is_passed_by(answer):
            print(f"failed: {question.text}\n  wanted {question.expected}\n  got    {answer}")
    for category in sorted(asked):
        print(f"{category}: {passed[category]} of {asked[category]}")
    print(f"all {name}: {passed.total()} of {asked.total()} ({100 * passed.total() / asked.total():.1f} %)")


def answers(llm: LLM, questions: Sequence[Question]) -> list[str]:
    """The model's greedy answer to each question."""
    tokenizer = llm.llm_engine.tokenizer
    assert tokenizer is not None
    prompts: list[dict[str, list[int]]] = []
    for question in questions:
        tools = [tool.definition for tool in question.tools]
        prompts.append({"prompt_token_ids": tokenizer.apply_chat_template(question.messages, ChatOptions(tools=tools))})
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, max_tokens=200), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


if __name__ == "__main__":
    main()
