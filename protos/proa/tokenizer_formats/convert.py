"""Make tokenizer.json of the files that a folder has in its place, by their names."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Final

from proa.tokenizer_formats.ranks import from_tekken, from_tiktoken
from proa.tokenizer_formats.sentencepiece import from_sentencepiece
from proa.tokenizer_formats.vocab_merges import from_vocab

TEKKEN, TIKTOKEN, SENTENCEPIECE = "tekken.json", "tiktoken.model", "tokenizer.model"
VOCAB, MERGES = "vocab.json", "merges.txt"
OTHER_FILES: Final = (TEKKEN, TIKTOKEN, SENTENCEPIECE, VOCAB)
"""The first that a folder has is converted, vocab.json with merges.txt."""
_TEKKEN_CONFIG: Final = b'{"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>"}'


def with_tokenizer(files: Mapping[str, bytes]) -> dict[str, bytes]:
    """`files` with a tokenizer.json in the place of the first of `OTHER_FILES`, if there is one of these and no
    tokenizer.json. Raises `ValueError` as `convert` does."""
    plain = {name: data for name, data in files.items() if name not in (*OTHER_FILES, MERGES)}
    others = [name for name in OTHER_FILES if name in files]
    if not others or "tokenizer.json" in files:
        return plain
    if others[0] == TEKKEN:
        plain = {"tokenizer_config.json": _TEKKEN_CONFIG, **plain}
    config = plain.get("tokenizer_config.json", b"{}")
    made = convert(others[0], files[others[0]], config, files.get(MERGES))
    return plain if made is None else plain | {"tokenizer.json": made}


@lru_cache(maxsize=1)  # a start reads a tokenizer several times
def convert(name: str, data: bytes, tokenizer_config: bytes, merges: bytes | None) -> bytes | None:
    """tokenizer.json of a file, whose `name` is one of `OTHER_FILES`. `tokenizer_config`, `merges`: the files. None for
    a vocab.json of an unknown class. Takes seconds for large vocabularies. Raises `ValueError` with a sentence that
    names the file."""
    try:
        if name == TEKKEN:
            return from_tekken(json.loads(data))
        fields = json.loads(tokenizer_config)
        if name == VOCAB:
            return from_vocab(data, merges, fields)
        return from_tiktoken(data, fields) if name == TIKTOKEN else from_sentencepiece(data, fields)
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be converted to tokenizer.json: {type(error).__name__}: {error}") from error
