"""SentencePiece's model file (tokenizer.model): a protobuf of pieces with scores, read without the library."""

import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from proa.tokenizer_formats.build import SPACE, AddedToken, merges_of_scores, sentencepiece_bpe, unigram

# Numbers of fields in sentencepiece_model.proto.
_PIECES, _TRAINER, _NORMALIZER = 1, 2, 3
_MODEL_TYPE, _BYTE_FALLBACK, _UNKNOWN_ID, _FIRST_ID = 3, 35, 40, 41
_CHARSMAP, _ADDS_PREFIX, _REMOVES_SPACES = 2, 3, 4
_UNIGRAM, _BPE = 1, 2
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED = 1, 2, 3, 4, 5

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5


@dataclass(frozen=True, slots=True)
class _Piece:
    text: str
    score: float
    kind: int


def from_sentencepiece(data: bytes, tokenizer_config: Mapping[str, Any]) -> bytes:
    """tokenizer.json of a tokenizer.model. `tokenizer_config` may add tokens, and says whether the first token comes
    before each text; unset: it does. Raises ValueError for another file."""
    model = _fields(data)
    pieces = [_piece(each) for each in model.get(_PIECES, ())]
    trainer, normalizer = (_fields(model.get(number, [b""])[-1]) for number in (_TRAINER, _NORMALIZER))
    if not pieces:
        raise ValueError("tokenizer.model has no pieces: it is not SentencePiece's")
    texts = [piece.text for piece in pieces]
    named = {int(token_id): each for token_id, each in (tokenizer_config.get("added_tokens_decoder") or {}).items()}
    added = {
        number: AddedToken(number, piece.text, piece.kind != _USER_DEFINED, normalized=SPACE in piece.text)
        for number, piece in enumerate(pieces)
        # One with a space is never found: spaces are replaced before.
        if piece.kind in (_UNKNOWN, _CONTROL) or (piece.kind == _USER_DEFINED and " " not in piece.text)
    }
    for token_id in sorted(named):
        each = named[token_id]
        added[token_id] = AddedToken(token_id, each["content"], bool(each.get("special")), normalized=False)
        if token_id == len(texts):  # behind the file's own
            texts.append(each["content"])
    first_id = _number(trainer, _FIRST_ID, 1)
    has_first = tokenizer_config.get("add_bos_token", True) and 0 <= first_id < len(pieces)
    first = added.get(first_id) if has_first else None
    kind = _number(trainer, _MODEL_TYPE, _UNIGRAM)
    unknown_id = _number(trainer, _UNKNOWN_ID, 0)
    is_prefixed = bool(_number(normalizer, _ADDS_PREFIX, 1))
    scores = [piece.score for piece in pieces]
    if kind == _UNIGRAM:
        return unigram(
            [*zip(texts, [*scores, *[0.0] * (len(texts) - len(scores))], strict=True)],
            list(added.values()),
            unknown_id=unknown_id,
            byte_fallback=bool(_number(trainer, _BYTE_FALLBACK, 0)),
            charsmap=normalizer.get(_CHARSMAP, [b""])[-1],
            removes_spaces=bool(_number(normalizer, _REMOVES_SPACES, 1)),
            prefixed=is_prefixed,
            first=first,
        )
    if kind != _BPE:
        raise ValueError("tokenizer.model is neither BPE nor unigram, which is not supported")
    merged = {
        piece.text: number for number, piece in enumerate(pieces) if piece.kind in (_NORMAL, _USER_DEFINED, _UNUSED)
    }
    merges = merges_of_scores(merged, scores)
    return sentencepiece_bpe(
        texts, merges, list(added.values()), unknown=texts[unknown_id], prefixed=is_prefixed, first=first
    )


def _piece(data: bytes) -> _Piece:
    fields = _fields(data)
    (score,) = struct.unpack("<f", fields.get(2, [bytes(4)])[-1])
    return _Piece(fields[1][-1].decode(), score, _number(fields, 3, _NORMAL))


def _number(fields: Mapping[int, list[Any]], number: int, default: int) -> int:
    value: int = fields.get(number, [default])[-1]
    return value


def _fields(data: bytes) -> dict[int, list[Any]]:
    """The fields of a protobuf message by number: integers, or bytes."""
    found: dict[int, list[Any]] = {}
    try:
        for number, value in _read(data):
            found.setdefault(number, []).append(value)
    except IndexError as error:
        raise ValueError("tokenizer.model is cut, or not SentencePiece's") from error
    return found


def _read(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    position = 0
    while position < len(data):
        key, position = _varint(data, position)
        wire = key & 7
        if wire == _VARINT:
            number, position = _varint(data, position)
            yield key >> 3, number
            continue
        if wire not in (_FIXED64, _BYTES, _FIXED32):
            raise ValueError("tokenizer.model is not SentencePiece's")
        size = 8 if wire == _FIXED64 else 4
        if wire == _BYTES:
            size, position = _varint(data, position)
        if position + size > len(data):
            raise IndexError
        yield key >> 3, data[position : position + size]
        position += size


def _varint(data: bytes, position: int) -> tuple[int, int]:
    """The number at `position`, and where it ends. Raises IndexError if the data ends before."""
    number = shift = 0
    while True:
        byte = data[position]
        number |= (byte & 127) << shift
        position, shift = position + 1, shift + 7
        if byte < 128:
            return number, position
