"""From token ids to text: an incremental detokenizer that is UTF-8 safe. Knows nothing of stop strings or requests.

Every token adds its own bytes to a text, so pieces are looked up and joined. Two things cross the border of a token: a
character whose bytes are spread over several (kept until it is whole; what is still broken when the text goes on or
ends becomes U+FFFD), and the space that sentencepiece-like tokenizers drop at the start of a text. The text is that of
`Tokenizer.decode` over all ids, and never depends on how they were divided into calls.
"""

import json
import re
from codecs import utf_8_decode
from collections.abc import Sequence
from typing import Final

from tokenizers import Tokenizer

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_MAX_CONTEXT: Final = 8  # tokens looked at for a character begun before the output; the longest has four bytes


class Vocabulary:
    """The bytes that each token of a tokenizer adds to a text, found when first needed and kept."""

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
        """What the token adds in the middle of a text, special tokens their names; empty for an unknown id."""
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if self._byte_level:
            return _byte_level_bytes(token)
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(match[1])
        return self._decode([*self._anchor_ids, token_id]).removeprefix(self._anchor_text).encode()

    def first_token_bytes(self, token_id: int) -> bytes:
        """What the token adds as the first of a text: some tokenizers drop a leading space there."""
        piece = self.token_bytes(token_id)
        return piece if self._byte_level or not piece.startswith(b" ") else self._decode([token_id]).encode()

    def is_skipped(self, token_id: int, skip_special_tokens: bool) -> bool:
        """Whether the token adds nothing: it is unknown, or special and those are skipped."""
        return (skip_special_tokens and token_id in self._special_ids) or self._tokenizer.id_to_token(token_id) is None

    def pieces(self, skip_special_tokens: bool) -> "_Pieces":
        return self._pieces[skip_special_tokens]

    def _decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)


class _Pieces(dict[int, str | bytes]):
    """Token id -> its text, or its bytes where they are not whole characters. Fills itself."""

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
    """Turns the tokens of one output into text as they come."""

    __slots__ = ("_at_start", "_pending", "_pieces", "_skip", "_vocabulary")

    def __init__(
        self, vocabulary: Vocabulary, *, skip_special_tokens: bool = True, context: Sequence[int] = ()
    ) -> None:
        """`context` are the tokens before the output, where its text goes on from theirs; it adds no text itself."""
        self._vocabulary = vocabulary
        self._pieces = vocabulary.pieces(skip_special_tokens)
        self._skip = skip_special_tokens
        self._pending = b""  # of a character that is not whole yet
        self._at_start = True
        self.push(context[-_MAX_CONTEXT:])

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete."""
        if self._at_start:
            return self._push_first(token_ids)
        if len(token_ids) == 1:
            return self._add(self._pieces[token_ids[0]])
        return "".join([self._add(self._pieces[token_id]) for token_id in token_ids])

    def finish(self) -> str:
        """The end of the text: bytes that never became a character."""
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
    """Undoes the alphabet in which byte-level tokenizers spell bytes; added tokens stand for themselves."""
    try:
        return bytes([_BYTE_OF[char] for char in token])
    except KeyError:
        return token.encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Printable Latin-1 characters stand for their own byte, the characters from U+0100 for the others in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(others)}


_BYTE_OF: Final = _byte_level_alphabet()
