"""A model's own answers, for training its drafter: `python -m training.own_answers MODEL answers.jsonl`.

Questions are those of the built-in model's text, and requests for explanations, code and JSON. Half of the answers are
greedy, half are drawn at a temperature of 0.7. The offline `LLM` generates until the time is over.
"""

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from proa_engine import LLM, SamplingParams
from training.conversations import conversation
from training.tokens import Document
from training.world import ANIMALS, COUNTRIES, NAMES, PLANETS, article

_ROUND = 64  # answers
_EXPLAIN = (
    "Write a short paragraph about {}.", "Explain in a few sentences what is special about {}.",
    "What should a child know about {}?", "Give me three facts about {}.", "Write a short poem about {}.",
    "Write a short letter to a friend about {}.",
)  # fmt: skip
_CODE = (
    "reverses a string", "returns the largest number of a list", "counts the words of a text", "adds two matrices",
    "checks whether a number is prime", "sorts a list of numbers", "removes duplicates from a list",
    "computes the factorial of n", "reads a file and prints its lines", "converts Celsius to Fahrenheit",
    "finds the common elements of two lists", "checks whether a word is a palindrome", "sums the digits of a number",
    "computes the average of a list", "merges two dictionaries", "searches a sorted list",
    "counts the vowels of a text", "returns the greatest common divisor of two numbers", "splits a list into chunks",
    "validates an email address",
)  # fmt: skip
_ASK_CODE = (
    "Write a function in {} that {}.", "Write {} code that {}.", "Show me a class in {} with a method that {}.",
)  # fmt: skip
_LANGUAGES = ("Python", "JavaScript", "Java", "C")
_ASK_JSON = (
    "Describe {} as a JSON object with the keys name, kind and description.", "Give me facts about {} as JSON.",
    "Write a JSON list of three things that belong to {}, each with a name and a price.",
)  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Write a model's answers as lines of JSON.")
    parser.add_argument("model", help="model directory")
    parser.add_argument("output", type=Path, help="file to write")
    parser.add_argument("--seconds", type=float, default=900, help="time to generate for")
    parser.add_argument("--max-tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    llm = LLM(arguments.model, dtype="float32", max_model_len=512, max_num_seqs=_ROUND // 2)
    until, asked = time.monotonic() + arguments.seconds, questions(Random(arguments.seed))
    num_tokens = 0
    with arguments.output.open("w") as file:
        while time.monotonic() < until:
            texts = [next(asked) for _ in range(_ROUND)]
            params = [
                SamplingParams(temperature=0.7 * (place % 2), seed=place, max_tokens=arguments.max_tokens)
                for place in range(_ROUND)
            ]
            chats = [[{"role": "user", "content": text}] for text in texts]
            for output in llm.chat(chats, params, use_tqdm=False):
                answer = list(output.outputs[0].token_ids)
                file.write(json.dumps({"prompt": output.prompt_token_ids, "answer": answer}) + "\n")
                num_tokens += len(answer)
            file.flush()
            print(f"{num_tokens:,} tokens", flush=True)


def questions(rng: Random) -> Iterator[str]:
    """Yield questions without end, none twice."""
    seen = set[str]()
    while True:
        text = _question(rng)
        if text not in seen:
            seen.add(text)
            yield text


def _question(rng: Random) -> str:
    kind = rng.random()
    if kind < 0.4:
        while (talk := conversation(rng)).tools:
            pass
        return talk.exchanges[0].question
    subject = rng.choice((rng.choice(COUNTRIES).name, article(rng.choice(ANIMALS).name), rng.choice(PLANETS).name))
    if kind < 0.6:
        return rng.choice(_EXPLAIN).format(subject)
    if kind < 0.8:
        return rng.choice(_ASK_CODE).format(rng.choice(_LANGUAGES), rng.choice(_CODE))
    return rng.choice(_ASK_JSON).format(rng.choice((subject, rng.choice(NAMES))))


def read_answers(path: Path) -> list[Document]:
    """The prompts with their answers, and the mask of the answers."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    return [
        (each["prompt"] + each["answer"], [False] * len(each["prompt"]) + [True] * len(each["answer"]))
        for each in lines
    ]


if __name__ == "__main__":
    main()
