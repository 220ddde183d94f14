"""The prompts of a benchmark: random tokens, shared prefixes, conversations of a ShareGPT file, or lines of a file."""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from proa_cli.bench.tokens import Tokenizer

_ATTEMPTS = 10  # to make a text of an exact length
# Bounds of vLLM for conversations, in tokens.
_MIN_TOKENS = 4
_MAX_PROMPT_TOKENS = 1024
_MAX_TOTAL_TOKENS = 2048


@dataclass(frozen=True, slots=True)
class Prompt:
    """`num_tokens`: of the text, without special tokens of the server or of a chat template; None: not counted."""

    text: str
    num_tokens: int | None
    output_tokens: int


@dataclass(frozen=True, slots=True)
class Ratios:
    """By how much lengths differ: they are drawn evenly from `length * (1 - ratio)` to `length * (1 + ratio)`."""

    inputs: float = 0.0
    outputs: float = 0.0

    def __post_init__(self) -> None:
        if not (0 <= self.inputs < 1 and 0 <= self.outputs < 1):
            raise ValueError("a range ratio must be at least 0 and below 1")

    def __str__(self) -> str:
        return f"{self.inputs:g}" if self.inputs == self.outputs else f"{self.inputs:g}, {self.outputs:g}"


@dataclass(frozen=True, slots=True)
class Lengths:
    """Of random prompts, in tokens. The prefix is the same in all and comes before the input."""

    inputs: int
    outputs: int
    ratios: Ratios = Ratios()
    prefix: int = 0


def random_prompts(tokenizer: Tokenizer, count: int, lengths: Lengths, draw: np.random.Generator) -> list[Prompt]:
    """Texts that have as many tokens as asked for, with those that the server adds. The inputs are runs of consecutive
    token ids from a random start. Raises `ValueError` for lengths below one token."""
    inputs = max(0, lengths.inputs - tokenizer.num_special_tokens)
    if lengths.prefix + math.floor(inputs * (1 - lengths.ratios.inputs)) < 1:
        raise ValueError(
            f"--random-input-len {lengths.inputs} is too short: {tokenizer.num_special_tokens} tokens of each prompt "
            "are special ones, and --random-range-ratio must leave at least one other"
        )
    pool = tokenizer.plain_tokens
    input_lengths = _between(inputs, lengths.ratios.inputs, count, draw)
    output_lengths = np.maximum(1, _between(lengths.outputs, lengths.ratios.outputs, count, draw))
    starts = draw.integers(0, len(pool), size=count)
    prefix = _random_tokens(pool, lengths.prefix, draw)
    prompts = []
    for index in range(count):
        first = int(starts[index]) + index
        tokens = [pool[(first + place) % len(pool)] for place in range(int(input_lengths[index]))]
        text, tokens = exact_text(tokenizer, [*prefix, *tokens], draw)
        prompts.append(Prompt(text, len(tokens), int(output_lengths[index])))
    return prompts


def repeated_prefix_prompts(
    tokenizer: Tokenizer,
    count: int,
    num_prefixes: int,
    prefix_length: int,
    suffix_length: int,
    output_tokens: int,
    draw: np.random.Generator,
) -> list[Prompt]:
    """`count // num_prefixes` prompts for each of the random prefixes, one prefix after the other."""
    if count < num_prefixes:
        raise ValueError(f"--num-prompts {count} must be at least --prefix-repetition-num-prefixes {num_prefixes}")
    pool = tokenizer.plain_tokens
    prompts = []
    for _ in range(num_prefixes):
        _, prefix = exact_text(tokenizer, _random_tokens(pool, prefix_length, draw), draw)
        for _ in range(count // num_prefixes):
            _, suffix = exact_text(tokenizer, _random_tokens(pool, suffix_length, draw), draw)
            tokens = [*prefix, *suffix]
            prompts.append(Prompt(tokenizer.decode(tokens), len(tokens), output_tokens))
    return prompts


def sharegpt_prompts(
    tokenizer: Tokenizer, path: Path, count: int, output_tokens: int | None, shuffle: Callable[[list[Any]], None]
) -> list[Prompt]:
    """The first message of each conversation, with an output as long as the second one, or `output_tokens`.

    Conversations of one message are left out, and those with fewer than 4 or more than 1,024 tokens in the prompt,
    fewer than 4 in the second message or more than 2,048 in both. Raises `ValueError` for a file of another form.
    """
    entries = _read_json(path)
    if not isinstance(entries, list):
        raise ValueError(f"{path} is not a JSON list of conversations")
    turns = [entry["conversations"] for entry in entries if len(entry.get("conversations") or ()) >= 2]
    shuffle(turns)
    prompts: list[Prompt] = []
    for first, second, *_ in turns:
        if len(prompts) == count:
            break
        length = len(tokenizer.encode(first["value"]))
        outputs = len(tokenizer.encode(second["value"])) if output_tokens is None else output_tokens
        is_long_enough = length >= _MIN_TOKENS and (outputs >= _MIN_TOKENS or output_tokens is not None)
        if is_long_enough and length <= _MAX_PROMPT_TOKENS and length + outputs <= _MAX_TOTAL_TOKENS:
            prompts.append(Prompt(first["value"], length, outputs))
    return prompts


def custom_prompts(
    path: Path,
    count: int,
    output_tokens: int,
    shuffle: Callable[[list[Any]], None],
    render: Callable[[str], str] | None,
) -> list[Prompt]:
    """The `prompt` of each line of a JSONL file, through `render` if it is given. `output_tokens` -1: the number that
    the line has as `output_tokens`. Raises `ValueError` for a line without these fields."""
    lines = list(_read_lines(path))
    shuffle(lines)
    prompts = []
    for line in lines[:count]:
        outputs = line.get("output_tokens") if output_tokens == -1 else output_tokens
        if not isinstance(line.get("prompt"), str) or not isinstance(outputs, int):
            needed = "`prompt` and `output_tokens`" if output_tokens == -1 else "`prompt`"
            raise ValueError(f"each line of {path} needs {needed}")
        prompts.append(Prompt(render(line["prompt"]) if render is not None else line["prompt"], None, outputs))
    return prompts


def oversample(prompts: Sequence[Prompt], count: int, draw: np.random.Generator) -> list[Prompt]:
    """`count` prompts: if there are fewer, random ones of them follow. Raises `ValueError` if there are none."""
    if not prompts:
        raise ValueError("the dataset has no prompt that can be used")
    more = draw.integers(0, len(prompts), size=max(0, count - len(prompts)))
    return [*prompts, *(prompts[index] for index in more)]


def random_text(tokenizer: Tokenizer, length: int, draw: np.random.Generator) -> str:
    """A text of `length` random tokens, which may be 0."""
    return exact_text(tokenizer, _random_tokens(tokenizer.plain_tokens, length, draw), draw)[0]


def exact_text(tokenizer: Tokenizer, tokens: Sequence[int], draw: np.random.Generator) -> tuple[str, list[int]]:
    """A text, and its tokens, of which there are as many as `tokens`.

    The text of arbitrary tokens may be encoded as more or fewer: it is then cut, or random tokens are appended, and
    encoded again, at most 10 times. After that the length may differ.
    """
    length, current = len(tokens), list(tokens)
    text = ""
    for _ in range(_ATTEMPTS):
        text = tokenizer.decode(current)
        encoded = tokenizer.encode(text)
        if len(encoded) == length:
            return text, encoded
        current = [*encoded[:length], *_random_tokens(tokenizer.plain_tokens, length - len(encoded), draw)]
    text = tokenizer.decode(current)
    return text, tokenizer.encode(text)


def _random_tokens(pool: Sequence[int], count: int, draw: np.random.Generator) -> list[int]:
    return [pool[index] for index in draw.integers(0, len(pool), size=max(0, count))]


def _between(length: int, ratio: float, count: int, draw: np.random.Generator) -> "np.ndarray[Any, np.dtype[Any]]":
    low, high = math.floor(length * (1 - ratio)), math.ceil(length * (1 + ratio))
    return draw.integers(low, high + 1, size=count)


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read --dataset-path {path}: {error}") from None


def _read_lines(path: Path) -> Iterator[Mapping[str, Any]]:
    try:
        for line in path.read_text().splitlines():
            if line.strip():
                parsed = json.loads(line)
                if not isinstance(parsed, Mapping):
                    raise ValueError("a line is not an object")
                yield parsed
    except (OSError, ValueError) as error:
        raise ValueError(f"cannot read --dataset-path {path}: {error}") from None
