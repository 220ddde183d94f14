"""The real models that `make real` fetches, and what `transformers` says about texts and tokens of it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[2] / "build/real-model"
EMBEDDER = FOLDER.with_name("real-embedder")
MARGIN = 1e-4  # between logits: rounding may decide which of two that are closer is larger
Record = Callable[[str, str], None]  # adds a row to the report of `tests/real`: what was measured, and the figures


@cache
def tokenizer() -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(FOLDER)


@cache
def reference() -> Any:
    """The model in float32 by `transformers`."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()


@dataclass(frozen=True)
class Judgement:
    """Of greedily chosen tokens, each after the tokens before it. `num_close` differ from the choice of `transformers`,
    whose logit is larger by less than `MARGIN`; `num_wrong` by more."""

    num_equal: int
    num_close: int
    num_wrong: int


@cache
@torch.inference_mode()
def judge(prompt: tuple[int, ...], token_ids: tuple[int, ...]) -> Judgement:
    """One pass over the prompt and the tokens: a pass is far cheaper than to generate, and is as strict."""
    logits = reference()(torch.tensor([prompt + token_ids[:-1]]), logits_to_keep=len(token_ids)).logits[0]
    behind = logits.amax(-1) - logits.gather(1, torch.tensor(token_ids)[:, None])[:, 0]
    num_equal, num_wrong = int((behind == 0).sum()), int((behind >= MARGIN).sum())
    return Judgement(num_equal, len(token_ids) - num_equal - num_wrong, num_wrong)


@torch.inference_mode()
def logprobs(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary] float32 of a model of `transformers`: row i has the log probabilities of token i + 1."""
    rows: torch.Tensor = model(torch.tensor([list(token_ids)])).logits[0].log_softmax(-1)
    return rows


def perplexity(rows: torch.Tensor, token_ids: Sequence[int]) -> float:
    """Over all tokens but the first, of `logprobs`."""
    chosen = rows[:-1].gather(1, torch.tensor(list(token_ids[1:]))[:, None])
    return math.exp(-float(chosen.double().mean()))
