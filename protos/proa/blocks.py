"""Hashes of KV cache blocks, over everything that a block's contents depend on; positions of checkpoints.

The engine's prefix cache and the gateway's router use the same hashes, so the router knows which engine has which part
of a prompt cached. A block's hash is the first 16 bytes of the SHA-256 over

    parent (16 bytes) | token ids | for each extra key: its length in bytes, the key

with token ids and lengths as little-endian uint32. The first block's parent is the root hash of model and revision.
Extra keys (`proa.contract.extra_keys`; text as UTF-8) are part of every block's hash. Behind them, a block that images
or audios touch has their keys (`proa.contract.media_keys`), and behind these a block with prompt embeddings has the
keys of its own (`proa.contract.embeds_keys`). All blocks of a chain have the same number of tokens. Test vectors, in
hexadecimal:

    root_hash("proa-builtin", "")                       c7f9407393e5323153531e373113be15
    hash_block(root, [1, 2, 3, 4])                      46ecec6d307371ff75afa64abe2edaa9
    hash_block(that, [5, 6, 7, 4294967295])             e282c451bd3c1b458f6dd43148784272
    hash_block(root, [1, 2, 3, 4], ["salt"])            0d44a07c58c19426c56331a7c0f8e7dc
    hash_block(root, [1, 2, 3, 4], ["salt", "lora"])    ea5340a0f6ad4949ce65867feaf7fdb1

and of hash_blocks(root, [1, 2, 9, 9, 9, 9, 3, 4, 5, 6, 7, 8], 4, ["salt"], [image]), where the image has the hash
000102030405060708090a0b0c0d0e0f, offset 2 and 4 tokens:

    dbaffaa901909e6ec87ebd37df4eb63a
    851488d9db5c15ce9405ee2b9ca26298
    e766b9f4b3852f62c8da5a607d83d7e6

and of hash_blocks(root, [1, 2, 3, 4], 4, extra_keys("salt", "", "", [audio])), where the audio has the same hash and no
tokens:

    b725934340c043221acf1934610d3bd2

and of hash_blocks(root, [1, 0, 0, 0, 0, 0, 2, 3], 4, embeds=[hashed(embeds)]), where the embeds have the offset 1, 5
tokens, the type FLOAT16 and the values 00 01 02 ... 13:

    18171111be02588c2ba8efb91fe56038
    826fc602fb69e429cd1ecf30b390ddce

A checkpoint is a block boundary at which an engine can resume a model with sliding windows or recurrent states. It is
named by the hash of the block before it. Test vectors, for blocks of 16 tokens, an interval of 512 and a minimum
junction of 256:

    num_tokens  hit    known    checkpoint_positions
    1           0      0        none
    17          0      0        16
    1024        0      0        512, 1008, 1024
    350         0      288      288, 336
    350         0      240      336
    1040        336    592      512, 592, 1024
    1040        1024   1024     none
"""

import struct
from collections import defaultdict
from collections.abc import Sequence
from hashlib import sha256
from typing import Final, TypeVar

from proa.contract.audio import Audio
from proa.contract.prompt_embeds import PromptEmbeds, embeds_keys
from proa.contract.request import HASH_BYTES, Image, media_keys

BLOCK_HASH_VERSION: Final = 1
"""Part of `GetModelInfoResponse`. Hashes of different versions cannot be compared."""

_TOKEN_BYTES: Final = 4
T = TypeVar("T", Image | Audio, PromptEmbeds)


def root_hash(model: str, revision: str) -> bytes:
    """The parent of first blocks: the first 16 bytes of SHA-256 over "proa.blocks", version, model and revision."""
    return sha256(b"proa.blocks" + struct.pack("<I", BLOCK_HASH_VERSION) + _suffix([model, revision])).digest()[
        :HASH_BYTES
    ]


def hash_block(parent: bytes, token_ids: Sequence[int], extra_keys: Sequence[bytes | str] = ()) -> bytes:
    """The hash of one block. Raises `struct.error` for token ids that do not fit a uint32."""
    return sha256(parent + _pack(token_ids) + _suffix(extra_keys)).digest()[:HASH_BYTES]


def hash_blocks(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    extra_keys: Sequence[bytes | str] = (),
    media: Sequence[Image | Audio] = (),
    embeds: Sequence[PromptEmbeds] = (),
) -> list[bytes]:
    """The hashes of the full blocks of these tokens, in order. `media` are images and audios by ascending
    offset, and `embeds` are `hashed`; their offsets are those in the tokens."""
    if media or embeds:
        return _hash_with_inputs(parent, token_ids, block_size, extra_keys, media, embeds)
    data, suffix, hashes = _pack(token_ids), _suffix(extra_keys), []
    stride = block_size * _TOKEN_BYTES
    for end in range(stride, len(data) + 1, stride):
        parent = sha256(parent + data[end - stride : end] + suffix).digest()[:HASH_BYTES]
        hashes.append(parent)
    return hashes


def checkpoint_positions(
    num_tokens: int, hit: int, known: int, interval: int, min_junction: int, block_size: int
) -> tuple[int, ...]:
    """The positions at which an engine makes checkpoints of a request as it joins a batch, ascending and distinct.

    Only positions after `hit` and at most `num_tokens` are returned:

    - the last block boundary before the last token, which is computed in any case;
    - `known`, the junction, if `known - hit >= min_junction`: another request computed the blocks up to it;
    - every multiple of `interval`. A request continues these with its output, and makes one more at its end.

    All arguments are numbers of tokens. `num_tokens`: the request's tokens when it joins, the prompt and the outputs
    from before a preemption. `hit`: those that it takes from the cache. `known`: the leading full blocks that are in
    the cache, at most up to the last boundary before the last token. `interval` is a multiple of `block_size`, 0 for
    none.
    """
    positions = {(num_tokens - 1) // block_size * block_size}
    if known - hit >= min_junction:
        positions.add(known)
    if interval:
        positions.update(range(interval, num_tokens + 1, interval))
    return tuple(sorted([position for position in positions if position > hit]))


def _pack(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def _hash_with_inputs(
    parent: bytes,
    token_ids: Sequence[int],
    block_size: int,
    extra_keys: Sequence[bytes | str],
    media: Sequence[Image | Audio],
    embeds: Sequence[PromptEmbeds],
) -> list[bytes]:
    media_of, embeds_of, hashes = _by_block(media, block_size), _by_block(embeds, block_size), list[bytes]()
    for block in range(len(token_ids) // block_size):
        start, end = block * block_size, (block + 1) * block_size
        of_media = media_keys(media_of.get(block, ()), start, end)
        keys = (*extra_keys, *of_media, *embeds_keys(embeds_of.get(block, ()), start, end))
        parent = hash_block(parent, token_ids[start:end], keys)
        hashes.append(parent)
    return hashes


def _by_block(inputs: Sequence[T], block_size: int) -> dict[int, list[T]]:
    """The inputs that each block touches, by its number."""
    touching = defaultdict[int, list[T]](list)
    for each in inputs:
        for block in range(each.offset // block_size, -(-each.end // block_size)):
            touching[block].append(each)
    return touching


def _suffix(keys: Sequence[bytes | str]) -> bytes:
    if not keys:
        return b""
    encoded = [key.encode() if isinstance(key, str) else key for key in keys]
    return b"".join(struct.pack("<I", len(key)) + key for key in encoded)
