"""The tokenizer and the chat template in GGUF's metadata, as the files that Hugging Face folders have.

Raises ValueError with a sentence for the user.
"""

from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from proa.tokenizer_formats.build import SPACE, AddedToken, byte_level_bpe, merges_of_scores, sentencepiece_bpe
from proa.tokenizer_formats.divisions import PRESETS
from proa_engine.sources.gguf.end_tokens import CONTROL, end_token_ids
from proa_engine.sources.gguf.header import Header, read_header

# Of tokenizer.ggml.token_type.
_NORMAL, _UNKNOWN, _USER_DEFINED, _UNUSED = 1, 2, 4, 5
_SPECIAL = (_UNKNOWN, CONTROL)
_ROLES = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
_INSTEAD = "give the folder or the id of the original model as tokenizer"


def make_tokenizer(header: Header) -> bytes:
    """tokenizer.json."""
    return _make_tokenizer(header.path, header.path.stat().st_mtime_ns)


@lru_cache(maxsize=1)  # a start reads a tokenizer several times, and a large one takes seconds
def _make_tokenizer(path: Path, changed: int) -> bytes:
    """`changed`: the time of the file's last change."""
    header = read_header(path)
    kind, texts = header.text("tokenizer.ggml.model"), _texts(header, "tokens")
    if kind not in ("gpt2", "llama"):
        raise ValueError(f"{header.path}: its tokenizer is of the kind {kind}, which is not supported; {_INSTEAD}")
    types = header.entries("tokenizer.ggml.token_type") or [_NORMAL] * len(texts)
    if len(types) != len(texts):
        raise ValueError(f"{header.path}: tokenizer.ggml.token_type has {len(types)} entries for {len(texts)} tokens")
    added = [
        # In SentencePiece's vocabularies these are written as the normalizer leaves a text.
        AddedToken(number, text, is_special=kind_ in _SPECIAL, normalized=kind == "llama" and SPACE in text)
        for number, (text, kind_) in enumerate(zip(texts, types, strict=True))
        if kind_ in (*_SPECIAL, _USER_DEFINED)
    ]
    return _byte_level(header, texts, added) if kind == "gpt2" else _sentencepiece(header, texts, types, added)


def make_tokenizer_config(header: Header) -> dict[str, Any]:
    """The fields of tokenizer_config.json."""
    texts = _texts(header, "tokens")
    fields: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
    for role, name in _ROLES.items():
        if token := _token(header, name, texts):
            fields[role] = token.text
    return fields


def make_generation_config(header: Header) -> dict[str, Any]:
    """The fields of generation_config.json."""
    return {"eos_token_id": end_token_ids(header)}


def chat_template(header: Header) -> bytes | None:
    """chat_template.jinja; None if the model has no template."""
    return header.text("tokenizer.chat_template").encode() or None


def _byte_level(header: Header, texts: Sequence[str], added: Sequence[AddedToken]) -> bytes:
    name = header.text("tokenizer.ggml.pre")
    if name not in PRESETS:
        raise ValueError(
            f"{header.path}: its tokenizer divides texts by the pattern {name or 'default'}, which is not known; "
            f"{_INSTEAD}"
        )
    preset = PRESETS[name]
    merges = [(left, right) for left, _, right in (merge.partition(" ") for merge in _texts(header, "merges"))]
    first = _first_token(header, texts, adds_first=preset.adds_first)
    return byte_level_bpe(texts, merges, added, preset.division, ignore_merges=preset.ignore_merges, first=first)


def _sentencepiece(header: Header, texts: Sequence[str], types: Sequence[int], added: Sequence[AddedToken]) -> bytes:
    scores = header.entries("tokenizer.ggml.scores")
    if len(scores) != len(texts) or not all(isinstance(score, int | float) for score in scores):
        raise ValueError(f"{header.path}: tokenizer.ggml.scores is no list of {len(texts)} numbers")
    merged = (_NORMAL, _USER_DEFINED, _UNUSED)
    pieces = {text: number for number, (text, kind) in enumerate(zip(texts, types, strict=True)) if kind in merged}
    unknown = _token(header, "unknown", texts)
    return sentencepiece_bpe(
        texts,
        merges_of_scores(pieces, scores),
        added,
        unknown=unknown.text if unknown else None,
        prefixed=bool(header.fields.get("tokenizer.ggml.add_space_prefix", True)),
        first=_first_token(header, texts, adds_first=True),
    )


def _first_token(header: Header, texts: Sequence[str], *, adds_first: bool) -> AddedToken | None:
    is_added = header.fields.get("tokenizer.ggml.add_bos_token", adds_first)
    return _token(header, "bos", texts) if is_added else None


def _token(header: Header, name: str, texts: Sequence[str]) -> AddedToken | None:
    """The token of a role; None if the model has none."""
    field = f"tokenizer.ggml.{name}_token_id"
    if field not in header.fields:
        return None
    token_id = header.fields[field]
    if type(token_id) is not int or not 0 <= token_id < len(texts):
        raise ValueError(f"{header.path}: {field} is {token_id!r}, which is no token")
    return AddedToken(token_id, texts[token_id], is_special=True)


def _texts(header: Header, name: str) -> list[str]:
    try:
        return [text.decode() for text in header.entries(f"tokenizer.ggml.{name}")]
    except (AttributeError, UnicodeDecodeError) as error:
        raise ValueError(f"{header.path}: tokenizer.ggml.{name} is not a list of texts") from error
