"""`proa complete`: prompts that the model of a running server continues."""

import argparse
from collections.abc import Sequence
from typing import Any

from proa_cli.conversation import add_arguments, converse


class Completion:
    """Completions. Each prompt stands alone."""

    path = "/completions"
    noun = "prompt"

    def __init__(self, max_tokens: int | None) -> None:
        self._limit = {} if max_tokens is None else {"max_tokens": max_tokens}

    def body(self, text: str) -> dict[str, Any]:
        return {"prompt": text, **self._limit}

    def read(self, choice: dict[str, Any]) -> tuple[str, str]:
        return "", choice.get("text") or ""

    def keep(self, text: str, answer: str) -> None:
        pass


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    add_arguments(parser, Completion.noun)
    parser.add_argument("--max-tokens", type=int, metavar="N", help="limit of tokens (default: the server's)")
    arguments = parser.parse_args(words)
    return converse(arguments, Completion(arguments.max_tokens))
