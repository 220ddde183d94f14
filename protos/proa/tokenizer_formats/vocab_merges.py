"""Byte-level BPE as older models publish it: vocab.json (token -> id) and merges.txt (a merge a line, the first made
first). How a text is divided is in neither, but follows from the class in tokenizer_config.json."""

import json
from collections.abc import Mapping
from typing import Any, Final

from proa.tokenizer_formats.build import AddedToken, byte_level_bpe
from proa.tokenizer_formats.divisions import PRESETS

_PRESET_OF_CLASS: Final = {"Qwen2Tokenizer": "qwen2", "GPT2Tokenizer": "gpt-2"}
_NOT_CONVERTED: Final = ("add_bos_token", "add_eos_token", "add_prefix_space")


def from_vocab(data: bytes, merges: bytes | None, tokenizer_config: Mapping[str, Any]) -> bytes | None:
    """tokenizer.json of a vocab.json and the `merges` beside it. `tokenizer_config` names the class and lists the added
    tokens. None if the class is another, or it changes texts. Raises ValueError for other files."""
    preset = _PRESET_OF_CLASS.get(str(tokenizer_config.get("tokenizer_class")).removesuffix("Fast"))
    named = tokenizer_config.get("added_tokens_decoder")
    if preset is None or not named or any(map(tokenizer_config.get, _NOT_CONVERTED)):
        return None
    if merges is None:
        raise ValueError("there is no merges.txt beside it")
    by_id = {token_id: token for token, token_id in json.loads(data).items()}
    lines = [line for line in merges.decode().split("\n") if line.strip() and not line.startswith("#version")]
    return byte_level_bpe(
        [by_id[token_id] for token_id in range(len(by_id))],
        [_pair(line) for line in lines],
        [_added(int(token_id), token) for token_id, token in named.items()],
        PRESETS[preset].division,
        ignore_merges=False,
        first=None,
    )


def _pair(line: str) -> tuple[str, str]:
    parts = line.rstrip("\r").split(" ")
    if len(parts) != 2:
        raise ValueError(f"merges.txt has a line that is no merge: {line[:100]!r}")
    return parts[0], parts[1]


def _added(token_id: int, token: Mapping[str, Any]) -> AddedToken:
    flags = {name: bool(token.get(name)) for name in ("normalized", "lstrip", "rstrip", "single_word")}
    return AddedToken(token_id, token["content"], bool(token.get("special")), **flags)
