"""PromptEmbeds: embeddings in the place of a prompt's tokens, and their part in the hashes of blocks."""

import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from hashlib import sha256
from typing import Final

_HASH_BYTES: Final = 16  # of an embedding


class EmbeddingType(IntEnum):
    """The type of an embedding's values, which are little-endian."""

    FLOAT32 = 1
    FLOAT16 = 2
    BFLOAT16 = 3

    @property
    def num_bytes(self) -> int:
        return 4 if self is EmbeddingType.FLOAT32 else 2


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptEmbeds:
    """Embeddings of neighbouring tokens of a prompt, whose token ids are 0. Raises `ValueError` unless `values` have
    the same number of values for each token, at least one."""

    offset: int = 0  # prompt tokens before the first one
    num_tokens: int
    type: EmbeddingType
    values: bytes = field(repr=False)  # one embedding after the other
    # 16 bytes for each embedding, see `hashed`; empty: not computed. Not sent: an engine trusts its own only.
    hashes: bytes = field(default=b"", repr=False, compare=False, metadata={"wire": False})

    def __post_init__(self) -> None:
        if not isinstance(self.type, EmbeddingType):
            raise ValueError(f"the type of prompt embeddings must be one of {', '.join(EmbeddingType.__members__)}")
        if self.num_tokens < 1 or not self.values or len(self.values) % (self.num_tokens * self.type.num_bytes):
            size = f"{len(self.values)} bytes of {self.type.name}"
            raise ValueError(f"prompt embeddings of {self.num_tokens} tokens cannot have {size}")

    @property
    def size(self) -> int:
        """The number of values of an embedding."""
        return len(self.values) // (self.num_tokens * self.type.num_bytes)

    @property
    def end(self) -> int:
        """The number of prompt tokens up to the last one."""
        return self.offset + self.num_tokens

    def behind(self, position: int) -> "PromptEmbeds | None":
        """Return the embeddings of the tokens from `position` on, without hashes; None if there are none."""
        num_before = max(0, position - self.offset)
        if num_before >= self.num_tokens:
            return None
        size = len(self.values) // self.num_tokens
        return PromptEmbeds(
            offset=self.offset + num_before,
            num_tokens=self.num_tokens - num_before,
            type=self.type,
            values=self.values[num_before * size :],
        )


def hashed(embeds: PromptEmbeds) -> PromptEmbeds:
    """Return `embeds` with the hash of each embedding: the first 16 bytes of the SHA-256 over the number of its type,
    one byte, and its values. Takes 1 s for 1 GB, or for 2 million tokens."""
    prefix, size = bytes([embeds.type]), len(embeds.values) // embeds.num_tokens
    values = memoryview(embeds.values)
    hashes = bytearray()
    for start in range(0, len(values), size):
        digest = sha256(prefix)
        digest.update(values[start : start + size])
        hashes += digest.digest()[:_HASH_BYTES]
    return replace(embeds, hashes=bytes(hashes))


def embeds_keys(embeds: Iterable[PromptEmbeds], start: int, end: int) -> Sequence[bytes]:
    """What the hash of the block of tokens start … end - 1 has behind the keys of images: for each of `embeds`, all of
    them `hashed`, that the block touches the offset from `start` of the first embedding in the block as little-endian
    uint32, then the hashes of its embeddings in the block."""
    keys: list[bytes] = []
    for each in embeds:
        first, behind = max(each.offset, start), min(each.end, end)
        if first < behind:
            hashes = each.hashes[(first - each.offset) * _HASH_BYTES : (behind - each.offset) * _HASH_BYTES]
            keys.append(struct.pack("<I", first - start) + hashes)
    return keys
