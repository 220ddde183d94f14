"""Drafts by prompt lookup as they are defined, in plain Python."""

from collections.abc import Sequence


def drafts_of(tokens: Sequence[int], count: int, min_ngram: int, max_ngram: int) -> list[int]:
    """By the definition: the longest n-gram first, the latest of its places, and on with what was drafted."""
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for place in range(end, end + count):
                    text.append(text[place])
                return text[len(tokens) :]
    return []
