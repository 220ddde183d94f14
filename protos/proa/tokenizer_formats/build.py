"""Make tokenizer.json from the parts that other formats store: tokens, merges or scores, and how text is divided.

Nothing here depends on a library, so that equal parts make equal bytes wherever they are converted.
"""

import base64
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

SPACE: Final = "\u2581"
"""SentencePiece's, in the place of a space."""

Part = Mapping[str, Any]
"""Of tokenizer.json."""


@dataclass(frozen=True, slots=True)
class AddedToken:
    """A token that is found in a text before anything else. `normalized`: in the text as the normalizer leaves it.
    `lstrip`, `rstrip`: with the spaces before or behind it. `single_word`: not within a word."""

    id: int
    text: str
    is_special: bool
    normalized: bool = False
    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False

    def entry(self) -> Part:
        flags = {name: getattr(self, name) for name in ("single_word", "lstrip", "rstrip", "normalized")}
        return {"id": self.id, "content": self.text, **flags, "special": self.is_special}


@dataclass(frozen=True, slots=True)
class Division:
    """How a text is divided before merges apply. `patterns` are regular expressions, each of which divides what the one
    before it has left. `gpt2_pattern`: divided by GPT-2's too. `by_digit`: each digit is on its own. `normalizer`: of
    the text before."""

    patterns: tuple[str, ...] = ()
    gpt2_pattern: bool = False
    by_digit: bool = False
    normalizer: Part | None = None

    def pre_tokenizer(self) -> Part:
        parts: list[Part] = [
            {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
            for pattern in self.patterns
        ]
        if self.by_digit:
            parts.append({"type": "Digits", "individual_digits": True})
        return {"type": "Sequence", "pretokenizers": [*parts, byte_level(use_regex=self.gpt2_pattern)]}


def byte_level(*, use_regex: bool) -> Part:
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def byte_level_bpe(
    tokens: Sequence[str],
    merges: Iterable[tuple[str, str]],
    added: Sequence[AddedToken],
    division: Division,
    *,
    ignore_merges: bool,
    first: AddedToken | None,
) -> bytes:
    """The tokenizer.json of GPT-2's kind. `tokens`: by id, spelled as there. `ignore_merges`: a piece of text that is a
    token becomes it, whatever the merges say. `first`: the token before each text."""
    model = {
        "type": "BPE",
        "unk_token": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": ignore_merges,
        "vocab": {text: token_id for token_id, text in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }
    decoder = byte_level(use_regex=True)
    return _dump(model, added, division.normalizer, division.pre_tokenizer(), decoder, first)


def sentencepiece_bpe(
    tokens: Sequence[str],
    merges: Iterable[tuple[str, str]],
    added: Sequence[AddedToken],
    *,
    unknown: str | None,
    prefixed: bool,
    first: AddedToken | None,
) -> bytes:
    """The tokenizer.json of SentencePiece's BPE, in which bytes stand for what has no token. `prefixed`: a text begins
    with a space that it has not itself."""
    model = {
        "type": "BPE",
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
        "ignore_merges": False,
        "vocab": {text: token_id for token_id, text in enumerate(tokens)},
        "merges": [list(pair) for pair in merges],
    }
    normalizer: Part = {"type": "Sequence", "normalizers": _escape_spaces(prefixed=prefixed)}
    return _dump(model, added, normalizer, None, _restore_spaces(prefixed=prefixed), first)


def unigram(
    tokens: Sequence[tuple[str, float]],
    added: Sequence[AddedToken],
    *,
    unknown_id: int,
    byte_fallback: bool,
    charsmap: bytes,
    removes_spaces: bool,
    prefixed: bool,
    first: AddedToken | None,
) -> bytes:
    """The tokenizer.json of SentencePiece's unigram model. `tokens`: with scores, by id. `charsmap`: its normalization
    of characters. `removes_spaces`: at both ends of a text, and all but one of several."""
    model: Part = {
        "type": "Unigram",
        "unk_id": unknown_id,
        "vocab": [list(token) for token in tokens],
        "byte_fallback": byte_fallback,
    }
    normalizers: list[Part] = []
    if charsmap:
        normalizers.append({"type": "Precompiled", "precompiled_charsmap": base64.b64encode(charsmap).decode()})
    if removes_spaces:
        normalizers.append({"type": "Strip", "strip_left": True, "strip_right": True})
        normalizers.append({"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": " "})
    normalizer: Part = {"type": "Sequence", "normalizers": [*normalizers, *_escape_spaces(prefixed=prefixed)]}
    return _dump(model, added, normalizer, None, _restore_spaces(prefixed=prefixed), first)


def merges_of_scores(pieces: Mapping[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """The merges by which SentencePiece's BPE makes each of `pieces` (text -> id) of two others, best score first.
    `scores`: by id."""
    found: list[tuple[float, int, int, str, str]] = []
    for piece, token_id in pieces.items():
        of_piece = []
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in pieces and right in pieces:
                of_piece.append((-scores[token_id], token_id, pieces[left], left, right))
        found += of_piece
    found.sort()
    return [(left, right) for *_, left, right in found]


def _escape_spaces(*, prefixed: bool) -> list[Part]:
    prefix: list[Part] = [{"type": "Prepend", "prepend": SPACE}] if prefixed else []
    return [*prefix, {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}]


def _restore_spaces(*, prefixed: bool) -> Part:
    strip: list[Part] = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefixed else []
    restore: Part = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
    return {"type": "Sequence", "decoders": [restore, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip]}


def _dump(
    model: Part,
    added: Sequence[AddedToken],
    normalizer: Part | None,
    pre_tokenizer: Part | None,
    decoder: Part,
    first: AddedToken | None,
) -> bytes:
    fields = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [each.entry() for each in sorted(added, key=lambda token: token.id)],
        "normalizer": normalizer,
        "pre_tokenizer": pre_tokenizer,
        "post_processor": None if first is None else _begin_with(first),
        "decoder": decoder,
        "model": model,
    }
    return json.dumps(fields, ensure_ascii=False).encode()


def _begin_with(token: AddedToken) -> Part:
    name = token.text

    def text(which: str, type_id: int) -> list[Part]:
        return [{"SpecialToken": {"id": name, "type_id": type_id}}, {"Sequence": {"id": which, "type_id": type_id}}]

    return {
        "type": "TemplateProcessing",
        "single": text("A", 0),
        "pair": [*text("A", 0), *text("B", 1)],
        "special_tokens": {name: {"id": name, "ids": [token.id], "tokens": [name]}},
    }
