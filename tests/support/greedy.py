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


@torch.inference_mode()
def greedy(folder: Path, prompts: Sequence[list[int]], num_tokens: int) -> list[Expected]:
    """Of each prompt by itself, in float32, beyond end tokens."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_generate(model, prompt, num_tokens) for prompt in prompts]


def _generate(model: Any, prompt: list[int], num_tokens: int) -> Expected:
    token_ids, num_sure = list(prompt), num_tokens
    cache = None
    step_input = token_ids
    for step in range(num_tokens):
        output = model(torch.tensor([step_input]), past_key_values=cache, use_cache=True)
        cache = output.past_key_values
        best = output.logits[0, -1].topk(2)
        if float(best.values[0] - best.values[1]) < MARGIN:
            num_sure = min(num_sure, step)
        token_ids.append(int(best.indices[0]))
        step_input = token_ids[-1:]
    return Expected(token_ids[len(prompt) :], num_sure)
