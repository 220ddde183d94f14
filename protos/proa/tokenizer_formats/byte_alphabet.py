"""GPT-2's alphabet, in which byte-level vocabularies spell bytes: printable Latin-1 characters are their own byte,
U+0100 and up the other bytes in order."""

from typing import Final

_PRINTABLE: Final = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS: Final = tuple(sorted(set(range(256)) - set(_PRINTABLE)))
BYTE_OF: Final = {chr(byte): byte for byte in _PRINTABLE} | {chr(0x100 + i): byte for i, byte in enumerate(_OTHERS)}
_CHARACTERS: Final = {byte: character for character, byte in BYTE_OF.items()}


def spell(data: bytes) -> str:
    """One character for each byte."""
    return "".join(map(_CHARACTERS.__getitem__, data))
