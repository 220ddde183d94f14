"""Audios for the fake model, all of whose tokens read one, and what its worker has of them in blocks."""

import random
import struct
from collections.abc import Sequence
from zlib import crc32

from proa.contract import Audio, hash_audio
from proa_engine.core.types import CrossInput, EncodedAudio

CROSS_TOKENS = 13
"""Of the longest audio."""

Cache = list[list[tuple[int, int, int] | None]]  # as `FakeExecutor` has it

_TABLE = -1  # in place of a table's index


def make_audio(name: int, num_samples: int = 2 * CROSS_TOKENS) -> Audio:
    """Audios of the same name and length are equal."""
    samples = struct.pack("<f", name) * num_samples
    return Audio(hash=hash_audio(samples), num_samples=num_samples, samples=samples)


def cross_tokens_of(num_samples: int) -> int:
    """The number of tokens of an audio."""
    return -(-num_samples // 2)


def random_audio(rng: random.Random) -> Audio:
    """One of a few, with samples or without."""
    name = rng.randrange(4)
    audio = make_audio(name, 2 * CROSS_TOKENS - 5 * name)
    return audio if rng.random() < 0.8 else Audio(hash=audio.hash, num_samples=audio.num_samples)


def number_of(audio_hash: bytes) -> int:
    """What the fake model adds to a request's first token, so that all its contexts depend on its audio."""
    return (1 + crc32(audio_hash)) << 32


def encode(cache: Cache, inputs: Sequence[CrossInput], epoch: int, step_budget: int) -> None:
    """Write a step's audios into their blocks, and nothing behind their ends."""
    assert len(inputs) < 2 or sum(each.num_tokens for each in inputs) <= step_budget, "a step encodes too much"
    for each in inputs:
        number, size = number_of(hash_audio(each.samples)), len(cache[0])
        assert len(each.block_ids) == len(set(each.block_ids)) == -(-each.num_tokens // size)
        for index, block_id in enumerate(each.block_ids):
            positions = range(index * size, (index + 1) * size)
            cache[block_id] = [(_TABLE, number + at, epoch) if at < each.num_tokens else None for at in positions]


def read(cache: Cache, audio: EncodedAudio, epoch: int, request_id: str) -> int:
    """Return the `number_of` the audio in these blocks, computed in `epoch` or later; 0 without audio."""
    found, size = list[int](), len(cache[0])
    for position in range(audio.num_tokens):
        value = cache[audio.block_ids[position // size]][position % size]
        assert value is not None, f"{request_id} reads nothing of its audio at {position}"
        assert value[0] == _TABLE, f"{request_id} reads tokens in place of its audio"
        assert value[2] >= epoch, f"{request_id} reads an audio that other weights encoded"
        found.append(value[1])
    first = found[0] if found else 0
    assert found == list(range(first, first + len(found))), f"{request_id} reads parts of several audios"
    return first
