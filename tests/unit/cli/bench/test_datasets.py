"""Prompts of a benchmark have the lengths that were asked for, whatever the tokenizer makes of random tokens."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from proa_cli.bench import datasets
from proa_cli.bench.datasets import Lengths, Prompt, Ratios
from proa_cli.bench.options import DatasetOptions
from proa_cli.bench.prompts import make_prompts
from proa_cli.bench.tokens import LocalTokenizer, read_tokenizer


class Merging:
    """A token is a letter, but `ab` is one token: a random text may have fewer tokens than it was made of."""

    name = "merging"
    plain_tokens = range(3)  # a, b, c
    num_special_tokens = 1

    def encode(self, text: str) -> list[int]:
        return ["abcX".index(piece) for piece in text.replace("ab", "X")]

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join(("a", "b", "c", "ab")[each] for each in token_ids)

    def render_chat(self, text: str) -> str:
        return f"<user>{text}<assistant>"


def draw() -> np.random.Generator:
    return np.random.default_rng(3)


def keep(items: list[Any]) -> None:
    """In place of shuffling."""


@pytest.fixture(scope="module")
def builtin() -> LocalTokenizer:
    return read_tokenizer("builtin")


def test_random_prompts_have_exactly_the_length_with_special_tokens(builtin: LocalTokenizer) -> None:
    prompts = datasets.random_prompts(builtin, 20, Lengths(inputs=40, outputs=7), draw())
    assert len({prompt.text for prompt in prompts}) == 20
    for prompt in prompts:
        assert len(builtin.encode(prompt.text)) == prompt.num_tokens == 40 - builtin.num_special_tokens
        assert prompt.output_tokens == 7


def test_a_text_that_merges_into_fewer_tokens_is_filled_up() -> None:
    text, tokens = datasets.exact_text(Merging(), [0, 1, 0, 1, 0, 1], draw())
    assert len(tokens) == len(Merging().encode(text)) == 6


def test_special_tokens_of_the_server_are_part_of_the_length() -> None:
    [prompt] = datasets.random_prompts(Merging(), 1, Lengths(inputs=10, outputs=1), draw())
    assert prompt.num_tokens == 9


def test_lengths_are_spread_evenly_between_the_bounds_of_the_ratio(builtin: LocalTokenizer) -> None:
    lengths = Lengths(inputs=10, outputs=10, ratios=Ratios(inputs=0.5, outputs=0.2))
    prompts = datasets.random_prompts(builtin, 300, lengths, draw())
    assert {prompt.num_tokens for prompt in prompts} == set(range(5, 16))
    assert {prompt.output_tokens for prompt in prompts} == set(range(8, 13))


def test_the_prefix_is_the_same_and_comes_on_top(builtin: LocalTokenizer) -> None:
    prompts = datasets.random_prompts(builtin, 5, Lengths(inputs=20, outputs=1, prefix=30), draw())
    texts = [builtin.encode(prompt.text) for prompt in prompts]
    assert all(len(tokens) == 50 for tokens in texts)
    assert len({tuple(tokens[:25]) for tokens in texts}) == 1  # its last tokens may merge with what follows
    assert len({tuple(tokens[30:]) for tokens in texts}) == 5


def test_a_prompt_without_tokens_is_refused() -> None:
    with pytest.raises(ValueError, match="--random-input-len 1 is too short"):
        datasets.random_prompts(Merging(), 1, Lengths(inputs=1, outputs=1), draw())


def test_repeated_prefixes_are_divided_evenly(builtin: LocalTokenizer) -> None:
    prompts = datasets.repeated_prefix_prompts(builtin, 7, 3, 12, 5, 9, draw())
    starts = [prompt.text[:10] for prompt in prompts]
    assert [starts.count(each) for each in dict.fromkeys(starts)] == [2, 2, 2]
    assert {(prompt.num_tokens, prompt.output_tokens) for prompt in prompts} == {(17, 9)}
    with pytest.raises(ValueError, match="must be at least --prefix-repetition-num-prefixes 3"):
        datasets.repeated_prefix_prompts(builtin, 2, 3, 12, 5, 9, draw())


def conversations(path: Path, *turns: Sequence[str]) -> Path:
    path.write_text(json.dumps([{"conversations": [{"value": each} for each in pair]} for pair in turns]))
    return path


def test_a_conversation_gives_its_first_message_and_the_length_of_its_second(tmp_path: Path) -> None:
    path = conversations(tmp_path / "a.json", ["cccc", "ccccc", "more"], ["alone"], ["ccc", "cccc"], ["cccc", "ccc"])
    path = conversations(path, ["c" * 1025, "cccc"], ["c" * 1000, "c" * 1049], *json_turns(path))
    assert datasets.sharegpt_prompts(Merging(), path, 9, None, keep) == [Prompt("cccc", 4, 5)]
    assert [each.output_tokens for each in datasets.sharegpt_prompts(Merging(), path, 9, 3, keep)] == [3, 3, 3]


def json_turns(path: Path) -> list[list[str]]:
    return [[turn["value"] for turn in entry["conversations"]] for entry in json.loads(path.read_text())]


def test_lines_of_a_file_are_prompts(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One", "output_tokens": 5}\n\n{"prompt": "Two", "output_tokens": 6}\n')
    assert datasets.custom_prompts(path, 9, 8, keep, None) == [Prompt("One", None, 8), Prompt("Two", None, 8)]
    [one] = datasets.custom_prompts(path, 1, -1, keep, Merging().render_chat)
    assert one == Prompt("<user>One<assistant>", None, 5)
    path.write_text('{"text": "One"}')
    with pytest.raises(ValueError, match="needs `prompt`"):
        datasets.custom_prompts(path, 1, 8, keep, None)


def test_too_few_prompts_are_repeated_or_sent_as_they_are(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "One"}\n{"prompt": "Two"}\n')
    options = DatasetOptions(dataset_name="custom", dataset_path=path, num_prompts=5, output_len=3)
    repeated = make_prompts(options, None)
    assert len(repeated) == 5
    assert {prompt.text for prompt in repeated} == {"One", "Two"}
    assert len(make_prompts(replace(options, oversample=False), None)) == 2
    path.write_text("")
    with pytest.raises(ValueError, match="no prompt"):
        make_prompts(options, None)


def test_the_order_of_a_file_depends_on_the_seed_or_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(f'{{"prompt": "{index}"}}\n' for index in range(20)))

    def order(**options: Any) -> list[str]:
        made = make_prompts(DatasetOptions(dataset_name="custom", dataset_path=path, num_prompts=20, **options), None)
        return [prompt.text for prompt in made]

    assert order(disable_shuffle=True) == [str(index) for index in range(20)]
    assert order(seed=1) == order(seed=1) != order(seed=2)
    assert sorted(order(seed=1), key=int) == order(disable_shuffle=True)


def test_random_tokens_of_the_builtin_model_have_texts_of_their_own(builtin: LocalTokenizer) -> None:
    assert all("\ufffd" not in builtin.decode([each]) for each in builtin.plain_tokens)
    assert builtin.render_chat("Hello").index("Hello") > 0
