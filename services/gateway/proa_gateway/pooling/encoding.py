"""Texts and pairs of texts to token ids. Special tokens that the tokenizer adds are never cut off."""

from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeVar

from tokenizers import Encoding, Tokenizer

T = TypeVar("T")
GROUP_CHARACTERS: Final = 262_144


@dataclass(frozen=True, slots=True)
class Limit:
    """`max_tokens` of a prompt that are kept; None: all. `side`: where the others are cut off."""

    max_tokens: int | None = None
    side: Literal["left", "right"] = "right"

    def cut(self, token_ids: Sequence[int], num_other: int = 0) -> Sequence[int]:
        """`num_other`: tokens of the prompt beside these."""
        if self.max_tokens is None:
            return token_ids
        return self.cut_to(token_ids, max(0, self.max_tokens - num_other))

    def cut_to(self, token_ids: Sequence[int], num_kept: int) -> Sequence[int]:
        return token_ids[:num_kept] if self.side == "right" else token_ids[max(0, len(token_ids) - num_kept) :]


@dataclass(frozen=True, slots=True)
class PairIds:
    """`second_start`: tokens before the second text's segment; None: the tokenizer makes no segments."""

    token_ids: Sequence[int]
    second_start: int | None


def encode_texts(
    tokenizer: Tokenizer, texts: Sequence[str], limit: Limit, *, add_special_tokens: bool
) -> list[Sequence[int]]:
    encoded: list[Sequence[int]] = []
    for group in in_groups(texts, len):
        encodings = tokenizer.encode_batch_fast(group, add_special_tokens=add_special_tokens)
        encoded += [array("I", _cut_text(encoding, limit)) for encoding in encodings]
    return encoded


def encode_pairs(tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]], limit: Limit) -> list[PairIds]:
    """The longer text of a pair is cut first, as in transformers."""
    groups = in_groups(pairs, lambda pair: len(pair[0]) + len(pair[1]))
    return [_cut_pair(encoding, limit) for group in groups for encoding in tokenizer.encode_batch_fast(group)]


def in_groups(texts: Sequence[T], size: Callable[[T], int]) -> Iterator[list[T]]:
    """Texts that are encoded at a time. Encodings take over a hundred bytes a token, until their ids are taken."""
    group: list[T] = []
    characters = 0
    for text in texts:
        if group and characters + size(text) > GROUP_CHARACTERS:
            yield group
            group, characters = [], 0
        group.append(text)
        characters += size(text)
    if group:
        yield group


def first_tokens(tokenizer: Tokenizer, texts: Sequence[str], num_tokens: int) -> list[str]:
    """Each text up to the end of its `num_tokens`-th token, above zero."""
    encodings = tokenizer.encode_batch(list(texts), add_special_tokens=False)
    return [
        text[: encoding.offsets[num_tokens - 1][1]] if len(encoding.ids) > num_tokens else text
        for text, encoding in zip(texts, encodings, strict=True)
    ]


def _cut_text(encoding: Encoding, limit: Limit) -> Sequence[int]:
    ids: list[int] = encoding.ids
    if limit.max_tokens is None or len(ids) <= limit.max_tokens:
        return ids
    start, end = _span(encoding.sequence_ids, 0)
    return limit.cut([*ids[:start], *limit.cut(ids[start:end], start + len(ids) - end), *ids[end:]])


def _cut_pair(encoding: Encoding, limit: Limit) -> PairIds:
    ids, types = list(encoding.ids), list(encoding.type_ids)
    if limit.max_tokens is not None and len(ids) > limit.max_tokens:
        sequence_ids = encoding.sequence_ids
        first, second = _span(sequence_ids, 0), _span(sequence_ids, 1)
        lengths = first[1] - first[0], second[1] - second[0]
        kept = _shares(*lengths, max(0, limit.max_tokens - len(ids) + sum(lengths)))
        for (start, end), num_kept in ((second, kept[1]), (first, kept[0])):
            ids[start:end] = limit.cut_to(ids[start:end], num_kept)
            types[start:end] = types[start : start + num_kept]
    return PairIds(array("I", ids), types.index(1) if 1 in types else None)


def _span(sequence_ids: Sequence[int | None], number: int) -> tuple[int, int]:
    """Where the tokens of a text are. Not those that the tokenizer adds, which belong to none."""
    if number not in sequence_ids:
        return len(sequence_ids), len(sequence_ids)
    start = sequence_ids.index(number)
    return start, start + sequence_ids.count(number)


def _shares(first: int, second: int, room: int) -> tuple[int, int]:
    """How many tokens of each text fit, cutting the longer one until they are equal."""
    if first + second <= room:
        return first, second
    shorter, longer = min(first, second), max(first, second)
    if shorter > room // 2:
        shorter = room // 2
    longer = min(longer, room - shorter)
    return (shorter, longer) if first <= second else (longer, shorter)
