"""A short greedy chat request through the OpenAI client."""

from collections.abc import Mapping
from typing import Any

from openai import OpenAI

QUESTION = "What is the capital of France?"


def deltas(client: OpenAI, question: str = QUESTION, headers: Mapping[str, str] | None = None) -> list[str]:
    """The text of each chunk of the streamed response."""
    messages: Any = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model="proa-builtin", messages=messages, temperature=0, max_tokens=48, stream=True, extra_headers=headers
    )
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def ask(client: OpenAI, question: str = QUESTION, headers: Mapping[str, str] | None = None) -> str:
    """The text of the response."""
    return "".join(deltas(client, question, headers))
