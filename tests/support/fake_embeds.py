"""Prompt embeddings for the fake model, which sees a number for each of them."""

import random
import struct
from collections.abc import Iterable, Sequence
from zlib import crc32

from proa.contract import EmbeddingType, PromptEmbeds
from proa.contract.prompt_embeds import hashed


def rows_of(embeds: Iterable[PromptEmbeds]) -> dict[int, bytes]:
    """The values of each embedding, by its position in the prompt."""
    rows: dict[int, bytes] = {}
    for piece in embeds:
        size = len(piece.values) // piece.num_tokens
        rows |= {piece.offset + index: piece.values[index * size :][:size] for index in range(piece.num_tokens)}
    return rows


def with_embeds(numbers: Sequence[int], embeds: Iterable[PromptEmbeds]) -> list[int]:
    """What the fake model sees of a prompt whose tokens it sees as `numbers`."""
    seen = list(numbers)
    for position, row in rows_of(embeds).items():
        seen[position] = crc32(row)
    return seen


def random_embeds(rng: random.Random, prompt: Sequence[int]) -> tuple[list[int], tuple[PromptEmbeds, ...]]:
    """The prompt with one or two pieces of embeddings, which are equal for equal tokens, so that blocks are shared."""
    end = len(prompt)
    places = rng.choice([[range(end)], [range(5)], [range(3, 14)], [range(2), range(4, 9)], [range(end // 2, end)]])
    token_ids, pieces = list(prompt), list[PromptEmbeds]()
    for place in (range(place.start, min(place.stop, end)) for place in places if place.start < end):
        values = b"".join(struct.pack("<2e", token_id, 1) for token_id in prompt[place.start : place.stop])
        kind = EmbeddingType.FLOAT16
        pieces.append(hashed(PromptEmbeds(offset=place.start, num_tokens=len(place), type=kind, values=values)))
        token_ids[place.start : place.stop] = [0] * len(place)
    return token_ids, tuple(pieces)
