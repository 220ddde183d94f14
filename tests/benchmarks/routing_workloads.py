"""Workloads that share prefixes: multi-turn chat, shared system prompts, documents with questions. Knows no engines."""

import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

ANSWER_TOKEN = 7
"""What every simulated engine answers, so that a conversation's next prompt is known."""


@dataclass(slots=True)
class Ask:
    """One request: when, what, and what comes of it."""

    at: float  # seconds
    prompt: list[int]
    session: str
    num_output_tokens: int = 32
    then: Callable[[float], "Ask | None"] = field(default=lambda now: None)  # the next request, once this has ended


def chat(rng: random.Random, rate: float, seconds: float, replicas: int) -> Iterator[Ask]:
    """Conversations of six turns: one of sixteen system prompts of 512 tokens, turns of 100 to 400 tokens, answers of
    32; the next turn comes two seconds after the answer, on average. `rate`: requests a second."""
    turns = 6
    systems = [_tokens(rng, 512) for _ in range(16)]
    for number, at in enumerate(_arrivals(rng, rate / turns, seconds)):
        yield _turn(rng, at, systems[rng.randrange(16)], f"chat {number}", turns)


def system_prompts(rng: random.Random, rate: float, seconds: float, replicas: int) -> Iterator[Ask]:
    """As many applications as replicas, each with a system prompt of 3,072 tokens, some far more popular than others
    (Zipf); 256 tokens of the user's own. Each user's session is another."""
    systems = [_tokens(rng, 3072) for _ in range(replicas)]
    weights = _zipf(replicas)
    for number, at in enumerate(_arrivals(rng, rate, seconds)):
        [system] = rng.choices(systems, weights)
        yield Ask(at, system + _tokens(rng, 256), f"user {number}")


def documents(rng: random.Random, rate: float, seconds: float, replicas: int) -> Iterator[Ask]:
    """Four times as many documents of 6,144 tokens as replicas, popular ones and others (Zipf), before a question of
    128 tokens. A session is a user, who asks of any document."""
    texts = [_tokens(rng, 6144) for _ in range(4 * replicas)]
    weights = _zipf(len(texts))
    for at in _arrivals(rng, rate, seconds):
        [text] = rng.choices(texts, weights)
        yield Ask(at, text + _tokens(rng, 128), f"user {rng.randrange(20 * replicas)}")


WORKLOADS = {"chat": chat, "system": system_prompts, "rag": documents}


def _turn(rng: random.Random, at: float, before: list[int], session: str, turns: int) -> Ask:
    prompt = before + _tokens(rng, rng.randrange(100, 400))
    ask = Ask(at, prompt, session)
    if turns > 1:
        answered = prompt + [ANSWER_TOKEN] * ask.num_output_tokens
        ask.then = lambda now: _turn(rng, now + rng.expovariate(0.5), answered, session, turns - 1)
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
