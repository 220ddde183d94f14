"""The 64-bit key of a request's sampling noise, which every front door must draw alike.

A request that asks for `n` choices with a seed is `n` requests, each with the key of (seed, choice index). Where the
client gives no seed, the front door draws one at random first, so that the choices still differ in the index alone.
"""

import hashlib

_DOMAIN = b"proa.sampling.v1"
_WORD = 2**64 - 1


def choice_key(seed: int, index: int) -> int:
    """The key of choice `index`, counted from 0, of a request with this seed; 0 <= key < 2**64.

    The seed counts modulo 2**64, so that negative ones are allowed. The key is the first eight bytes, little-endian,
    of the SHA-256 of the domain name, the seed and the index, both as little-endian unsigned 64-bit words.
    """
    if index < 0:
        raise ValueError(f"choice index must not be negative, got {index}")
    message = _DOMAIN + (seed & _WORD).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")
