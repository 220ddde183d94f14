"""`proa chat`: a conversation with the model of a running server."""

import argparse
from collections.abc import Sequence
from typing import Any

from proa_cli.conversation import add_arguments, converse


class Chat:
    """Chat completions. Each question is sent with the messages before it."""

    path = "/chat/completions"
    noun = "message"

    def __init__(self, system_prompt: str | None) -> None:
        self._messages = [] if system_prompt is None else [{"role": "system", "content": system_prompt}]

    def body(self, text: str) -> dict[str, Any]:
        return {"messages": [*self._messages, {"role": "user", "content": text}]}

    def read(self, choice: dict[str, Any]) -> tuple[str, str]:
        delta = choice["delta"]
        return delta.get("reasoning") or delta.get("reasoning_content") or "", delta.get("content") or ""

    def keep(self, text: str, answer: str) -> None:
        self._messages += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    add_arguments(parser, Chat.noun)
    parser.add_argument("--system-prompt", metavar="TEXT", help="message of the role system, before all others")
    arguments = parser.parse_args(words)
    return converse(arguments, Chat(arguments.system_prompt))
