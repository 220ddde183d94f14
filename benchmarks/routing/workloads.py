"""Workloads that share prefixes: multi-turn chat, shared system prompts, documents with questions."""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ANSWER_TOKEN = 7
"""The token that simulated engines generate, so that a conversation's next prompt is known."""


@dataclass(slots=True)
class Ask:
    """One request, and the request that follows it."""

    at: float  # arrival time, seconds
    prompt: list[int]
    session_id: str
    num_output_tokens: int = 32
    then: Callable[[float], "Ask | None"] = field(default=lambda now: None)  # the next request, once this has ended


def chat(rng: random.Random, rate: float, seconds: float, replicas: int) -> Iterator[Ask]:
    """Six turns of 100 to 400 tokens after one of 16 system prompts of 512 tokens; answers of 32 tokens.

    The next turn comes two seconds after the answer on average. `rate`: requests per second.
    """
    turns = 6
    systems = [_tokens(rng, 512) for _ in range(16)]
    for number, at in enumerate(_arrivals(rng, rate / turns, seconds)):
        yield _turn(rng, at, systems[rng.randrange(16)], f"chat {number}", turns)


def system_prompts(rng: random.Random, rate: float, seconds: float, replicas: int) -> Iterator[Ask]:
    """One system prompt of 3,072 tokens per replica, drawn from a Zipf distribution, and 256 unshared tokens. Each
    request is a session of its own."""
    systems = [_tokens(rng, 3072) for _ in range(replicas)]
    weights = _zipf(replicas)
    for number, at in enumerate(_arrivals(rng, rate, seconds)):
        [system] = rng.choices(systems, weights)
        yield Ask(at, system + _tokens(rng, 256), f"user {number}")


def documents(rng: random.Random, rate: float, seconds: float, replicas: int) -> Iterator[Ask]:
    """Four documents of 6,144 tokens per replica, drawn from a Zipf distribution, and a question of 128 tokens. A
    session is a user, who asks about any document."""
    texts = [_tokens(rng, 6144) for _ in range(4 * replicas)]
    weights = _zipf(len(texts))
    for at in _arrivals(rng, rate, seconds):
        [text] = rng.choices(texts, weights)
        yield Ask(at, text + _tokens(rng, 128), f"user {rng.randrange(20 * replicas)}")


WORKLOADS = {"chat": chat, "system": system_prompts, "rag": documents}


def _turn(rng: random.Random, at: float, before: list[int], session_id: str, turns: int) -> Ask:
    prompt = before + _tokens(rng, rng.randrange(100, 400))
    ask = Ask(at, prompt, session_id)
    if turns > 1:
        answered = prompt + [ANSWER_TOKEN] * ask.num_output_tokens
        ask.then = lambda now: _turn(rng, now + rng.expovariate(0.5), answered, session_id, turns - 1)
    return ask


def _arrivals(rng: random.Random, rate: float, seconds: float) -> Iterator[float]:
    at = rng.expovariate(rate)
    while at < seconds:
        yield at
        at += rng.expovariate(rate)


def _tokens(rng: random.Random, count: int) -> list[int]:
    return array("I", rng.randbytes(4 * count)).tolist()


def _zipf(count: int) -> list[float]:
    return [1 / (rank + 1) for rank in range(count)]
