"""Greedy decoding by `transformers`, and how far its tokens are sure.

Tokens are compared up to the first step whose two most likely tokens are closer than `MARGIN`, where rounding may
decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

MARGIN = 1e-4


@dataclass(frozen=True)
class Expected:
    token_ids: list[int]
    num_sure: int  # tokens before the first step whose margin is too small


def check_tokens(token_ids: Sequence[Sequence[int]], expected: Sequence[Expected]) -> None:
    """Of each case, as far as they are sure."""
    for index, (ours, theirs) in enumerate(zip(token_ids, expected, strict=True)):
        assert list(ours[: theirs.num_sure]) == theirs.token_ids[: theirs.num_sure], f"case {index}"


@torch.inference_mode()
def greedy(
    folder: Path, prompts: Sequence[list[int]], num_tokens: int, guesses: Sequence[list[int]] | None = None
) -> list[Expected]:
    """Of each prompt by itself, in float32, beyond end tokens.

    `guesses`: the tokens to be expected for each prompt. The result is the same without them, but takes a forward pass
    for each token instead of one for all.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    guesses = [[]] * len(prompts) if guesses is None else guesses
    return [_generate(model, prompt, num_tokens, guess) for prompt, guess in zip(prompts, guesses, strict=True)]


def _generate(model: Any, prompt: list[int], num_tokens: int, guess: list[int]) -> Expected:
    best = _after_each(model, prompt, guess) if guess else None
    if best is None or best.indices[:, 0].tolist() != guess:
        best = _decode(model, prompt, num_tokens)
    unsure = (best.values[:, 0] - best.values[:, 1] < MARGIN).nonzero()
    return Expected(best.indices[:, 0].tolist(), int(unsure[0]) if len(unsure) else num_tokens)


def _after_each(model: Any, prompt: list[int], tokens: list[int]) -> torch.return_types.topk:
    """The two most likely tokens at the place of each of `tokens`, [tokens, 2]."""
    logits: torch.Tensor = model(torch.tensor([[*prompt, *tokens[:-1]]])).logits[0, len(prompt) - 1 :]
    return logits.topk(2)


def _decode(model: Any, prompt: list[int], num_tokens: int) -> torch.return_types.topk:
    """The two most likely tokens of each step, [steps, 2]."""
    logits: list[torch.Tensor] = []
    cache, step_input = None, prompt
    for _ in range(num_tokens):
        output = model(torch.tensor([step_input]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        logits.append(output.logits[0, -1])
        step_input = [int(logits[-1].argmax())]
    return torch.stack(logits).topk(2)
