"""Prompts and documents for a real model: questions, continuations, code, Unicode and long texts."""

from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
LONG_TOKENS = 1500

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "Explain in two sentences why the sky is blue.",
    "What is 17 plus 25? Answer with the number alone.",
    "Name three planets of the solar system, separated by commas.",
    "Translate into French: The cat sleeps on the chair.",
    "Who wrote 'Romeo and Juliet'?",
    "Give me a short recipe for pancakes.",
    "Rewrite in the past tense: She walks to the market and buys bread.",
    "Is a tomato a fruit or a vegetable?",
)
CONTINUATIONS = (
    "Once upon a time, in a small village by the river,",
    "The three laws of motion are",
    "1, 1, 2, 3, 5, 8, 13,",
    "Dear Sir or Madam,\n\nI am writing to",
    "The",
    "To be, or not to be, that is",
)
CODE = (
    'def fibonacci(n: int) -> int:\n    """Return the n-th Fibonacci number."""\n',
    "SELECT name, COUNT(*) FROM orders JOIN customers ON",
    '{"name": "Ann", "age": 31, "children": [{"name": "Ben", "age":',
    "#include <stdio.h>\n\nint main(void) {\n    for (int i = 0; i < 10; i++) {\n",
    "<!DOCTYPE html>\n<html>\n  <head>\n    <title>",
)
UNICODE = (
    "Bonjour, je m'appelle Zoé et j'habite à",
    "日本の首都は",
    "Привет! Как",
    "😀😃😄 these emoji mean",
    "∑ᵢ xᵢ² ≤ ‖x‖² holds because",
)

DOCUMENTS = {
    "story": (
        "The old lighthouse keeper climbed the stairs every evening, counting each step under his breath. There "
        "were one hundred and twelve of them, and he knew which ones creaked. At the top he lit the lamp, wiped "
        "the salt from the glass, and sat down with his tea. On clear nights he could see the lights of the "
        "fishing boats far out on the water. On stormy nights he saw nothing at all, but he kept the lamp "
        "burning, because somebody out there might be looking for it. One morning in March a small boat came in "
        "without a sail, and a girl of about ten stepped onto the rocks. She said that she had followed the light "
        "for two days."
    ),
    "science": (
        "Photosynthesis is the process by which green plants, algae and some bacteria turn light into chemical "
        "energy. In the leaves of a plant, chlorophyll absorbs mostly red and blue light, and the energy is used "
        "to split water into oxygen, protons and electrons. The oxygen leaves through small pores, while the "
        "electrons pass along a chain of proteins and help to make two molecules that store energy. In a second "
        "stage, which needs no light, these molecules drive the Calvin cycle, in which carbon dioxide from the "
        "air becomes sugar. The rate of photosynthesis depends on the amount of light, on the temperature and on "
        "the concentration of carbon dioxide."
    ),
    "code": (
        "from collections import Counter\n"
        "\n"
        "\n"
        "def most_common_words(path: str, count: int = 10) -> list[tuple[str, int]]:\n"
        '    """Return the most common words of a text file, with how often each appears."""\n'
        "    words = Counter()\n"
        '    with open(path, encoding="utf-8") as file:\n'
        "        for line in file:\n"
        "            for word in line.lower().split():\n"
        '                words[word.strip(".,;:!?")] += 1\n'
        "    return words.most_common(count)\n"
        "\n"
        "\n"
        'if __name__ == "__main__":\n'
        '    for word, number in most_common_words("book.txt"):\n'
        '        print(f"{word}: {number}")\n'
    ),
    "letter": (
        "Dear Dr. Martin,\n\nThank you for your letter of 3 May. I am glad that the committee has decided to "
        "support our project, and I would like to answer your questions about the budget. The largest part, about "
        "60 percent, pays for two researchers during the first year. Another 25 percent is for equipment, most of "
        "which can be used again by later projects. The rest covers travel and the workshop in October, for which "
        "we expect thirty guests. If you need more detail, please call me on any weekday before noon.\n\nYours "
        "sincerely,\nAnna Berg\n"
    ),
}
"""Written for these tests, so that no model has been trained on them."""


def chat(question: str) -> list[dict[str, Any]]:
    return [{"role": "user", "content": question}]


def short_prompts(tokenizer: Any) -> list[list[int]]:
    """26 prompts as token ids: chats, and texts to continue."""
    chats = [tokenizer.apply_chat_template(chat(text), add_generation_prompt=True)["input_ids"] for text in QUESTIONS]
    return chats + [tokenizer.encode(text) for text in (*CONTINUATIONS, *CODE, *UNICODE)]


def long_prompts(tokenizer: Any) -> list[list[int]]:
    """Four prompts of `LONG_TOKENS`: a licence, a page, a program and a table."""
    rows = "\n".join(f"{number},item {number * 37 % 101},{number * 7 % 50}.{number % 10}0" for number in range(1, 400))
    texts = [(ROOT / path).read_text() for path in ("LICENSE", "docs/architecture.md", "protos/proa/text.py")]
    encoded = [tokenizer.encode(text) for text in (*texts, f"number,name,price\n{rows}")]
    assert all(len(each) >= LONG_TOKENS for each in encoded)
    return [each[:LONG_TOKENS] for each in encoded]
