"""The 64-bit key of a request's sampling noise. The gateway and the offline `LLM` must derive the same keys.

A request for `n` choices becomes `n` engine requests with the keys of (seed, choice index). Without a seed from the
client, one random seed is drawn for all choices.
"""

import hashlib

_DOMAIN = b"proa.sampling.v1"
_WORD = 2**64 - 1


def choice_key(seed: int, index: int) -> int:
    """The key of choice `index`, counted from 0; 0 <= key < 2**64.

    The seed is taken modulo 2**64, so it may be negative. The key is the first eight bytes, little-endian, of the
    SHA-256 of the domain, the seed and the index, both as little-endian unsigned 64-bit words.
    """
    if index < 0:
        raise ValueError(f"choice index must not be negative, got {index}")
    message = _DOMAIN + (seed & _WORD).to_bytes(8, "little") + index.to_bytes(8, "little")
    return int.from_bytes(hashlib.sha256(message).digest()[:8], "little")
