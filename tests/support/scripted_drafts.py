"""Drafts that a test decides, over a drafter that computes its entries all the same."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from unittest import mock

import torch
from torch import Tensor

from proa_engine.kernels.sampling.draft_state import DraftPlace, DraftRows
from proa_engine.step.hidden_drafts import HiddenDrafts

Script = Callable[[tuple[int, ...], int], int]  # a request's tokens and the drafter's choice -> the draft token


@contextmanager
def scripted_drafts(script: Script) -> Iterator[dict[tuple[int, ...], int]]:
    """Draft by `script` meanwhile. Yields what the drafter would have proposed, by a request's tokens before."""
    choices: dict[tuple[int, ...], int] = {}
    choose = HiddenDrafts._choose

    def scripted(
        drafts: HiddenDrafts, rows: DraftRows, logits: Tensor, place: DraftPlace, way: int, *, is_random: bool
    ) -> Tensor:
        drafted = []
        own = choose(drafts, rows, logits, place, way, is_random=is_random).tolist()
        for slot, position, choice in zip(rows.slots.tolist(), place.positions.tolist(), own, strict=True):
            tokens = tuple(drafts._tables.token_ids[slot, :position].tolist())
            choices[tokens] = choice
            drafted.append(script(tokens, choice))
        return torch.tensor(drafted)

    with mock.patch.object(HiddenDrafts, "_choose", scripted):
        yield choices


def seven_of_ten(sequences: Mapping[str, Sequence[int]]) -> Script:
    """Drafts of which 70 % are the next token of one of these sequences."""
    following = {tuple(tokens[:count]): tokens[count] for tokens in sequences.values() for count in range(len(tokens))}

    def script(tokens: tuple[int, ...], choice: int) -> int:
        right = following.get(tokens, choice)
        return right if (sum(tokens) + 7 * len(tokens)) % 10 < 7 else (right + 1) % 200

    return script
