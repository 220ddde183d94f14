"""Reference for n-gram drafts (prompt lookup decoding), in plain Python."""

from collections.abc import Sequence


def drafts_of(tokens: Sequence[int], count: int, min_ngram: int, max_ngram: int) -> list[int]:
    """Up to `count` draft tokens: those after the latest earlier occurrence of the longest n-gram that ends `tokens`.

    Draft tokens may themselves be copied. Empty if no n-gram occurs earlier.
    """
    for size in range(min(max_ngram, len(tokens) - 1), min_ngram - 1, -1):
        for end in range(len(tokens) - 1, size - 1, -1):
            if tokens[end - size : end] == tokens[-size:]:
                text = list(tokens)
                for position in range(end, end + count):
                    text.append(text[position])
                return text[len(tokens) :]
    return []
