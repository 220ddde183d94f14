"""Incremental detokenizer, UTF-8 safe.

Each token adds its own bytes, so a token's piece is looked up and appended. Two cases need more than one token:

- A character's bytes may be split over several tokens. They are kept until it is complete; bytes that are invalid or
  incomplete at the end become U+FFFD.
- SentencePiece-like tokenizers drop a leading space at the start of a text.

The text equals `Tokenizer.decode` over all ids, however they are divided into calls.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

from proa.tokenizer_formats.byte_alphabet import BYTE_OF

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CONTEXT: Final = (
    8  # tokens searched for an incomplete character before the output; a character has at most 4 bytes
)


class Vocabulary:
    """The bytes that each token of a tokenizer adds to a text. Cached when first used."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._special_ids = {i for i, token in tokenizer.get_added_tokens_decoder().items() if token.special}
        decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
        kinds = {part["type"] for part in [decoder, *decoder.get("decoders", [])] if part}
        self._byte_level = "ByteLevel" in kinds
        self._byte_fallback = "ByteFallback" in kinds
        self._anchor_ids = tokenizer.encode("a", add_special_tokens=False).ids
        self._anchor_text = self._decode(self._anchor_ids)
        self._pieces = {skip: _Pieces(self, skip) for skip in (False, True)}

    def token_bytes(self, token_id: int) -> bytes:
        """The token's bytes in the middle of a text; for a special token its name, for an unknown id nothing."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._decode([*self._anchor_ids, token_id]).removeprefix(self._anchor_text).encode()

    def first_token_bytes(self, token_id: int) -> bytes:
        """The token's bytes at the start of a text, where some tokenizers drop a leading space."""
        piece = self.token_bytes(token_id)
        return piece if self._byte_level or not piece.startswith(b" ") else self._decode([token_id]).encode()

    def is_skipped(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token adds no text: its id is unknown, or it is special and special tokens are skipped."""
        return (skip_special_tokens and token_id in self._special_ids) or self._tokenizer.id_to_token(token_id) is None

    def pieces(self, skip_special_tokens: bool) -> "_Pieces":
        return self._pieces[skip_special_tokens]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class _Pieces(dict[int, str | bytes]):
    """Token id -> its text, or its bytes if they are not whole characters. Entries are added when first used."""

    def __init__(self, vocabulary: Vocabulary, skip_special_tokens: bool) -> None:
        super().__init__()
        self._vocabulary = vocabulary
        self._skip = skip_special_tokens

    def __missing__(self, token_id: int) -> str | bytes:
        skipped = self._vocabulary.is_skipped(token_id, self._skip)
        data = b"" if skipped else self._vocabulary.token_bytes(token_id)
        try:
            piece: str | bytes = data.decode()
        except UnicodeDecodeError:
            piece = data
        self[token_id] = piece
        return piece


class Detokenizer:
    """Turns the tokens of one output into text."""

    __slots__ = ("_at_start", "_pending", "_pieces", "_skip", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        """`context`: the tokens before the output, if its text continues theirs. They add no text."""
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces(skip_special_tokens)
        self._skip = skip_special_tokens
        self._pending = b""  # bytes of an incomplete character
        self._at_start = True
        self.push(context[-_MAX_CONTEXT:])

    def push(self, token_ids: Sequence[int]) -> str:
        """Add tokens; returns the text that is complete with them."""
        if self._at_start:
            return self._push_first(token_ids)
        return "".join([self._add(self._pieces[token_id]) for token_id in token_ids])

    def push_token(self, token_id: int) -> str:
        """`push` one token: the common case, without a sequence for it."""
        piece = self._pieces[token_id]
        if piece.__class__ is str and not self._pending and not self._at_start:
            return piece
        return self.push((token_id,))

    def finish(self) -> str:
        """The rest of the text: U+FFFD for an incomplete character."""
        text, self._pending = self._pending.decode(errors="replace"), b""
        return text

    def _add(self, piece: str | bytes) -> str:
        if piece.__class__ is str and not self._pending:
            return piece
        data = self._pending + (piece.encode() if isinstance(piece, str) else piece)
        text, length = utf_8_decode(data, "replace", False)
        self._pending = data[length:]
        return text

    def _push_first(self, token_ids: Sequence[int]) -> str:
        for position, token_id in enumerate(token_ids):
            if not self._vocabulary.is_skipped(token_id, self._skip):
                self._at_start = False
                text = self._add(self._vocabulary.first_token_bytes(token_id))
                return text + self.push(token_ids[position + 1 :])
        return ""


def _byte_level_bytes(token: str) -> bytes:
    """The bytes that a byte-level tokenizer's token stands for. Added tokens are plain text."""
    try:
        return bytes([BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()
