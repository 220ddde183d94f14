"""Block hashes equal the published vectors, and differ if anything that a block depends on differs;
checkpoint positions equal the published vectors."""

import struct
import time
from hashlib import sha256

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa.blocks import checkpoint_positions, hash_block, hash_blocks, root_hash
from proa.contract import Audio, Image, extra_keys, media_keys
from proa.contract.prompt_embeds import EmbeddingType, PromptEmbeds, hashed

ROOT = root_hash("proa-builtin", "")
ids = st.lists(st.integers(0, 2**32 - 1), min_size=4, max_size=4)
keys = st.lists(st.text(max_size=3), max_size=3)
hashes = st.binary(min_size=16, max_size=16)


def test_published_vectors_hold() -> None:
    first = hash_block(ROOT, [1, 2, 3, 4])
    assert ROOT.hex() == "c7f9407393e5323153531e373113be15"
    assert first.hex() == "46ecec6d307371ff75afa64abe2edaa9"
    assert hash_block(first, [5, 6, 7, 2**32 - 1]).hex() == "e282c451bd3c1b458f6dd43148784272"
    assert hash_block(ROOT, [1, 2, 3, 4], ["salt"]).hex() == "0d44a07c58c19426c56331a7c0f8e7dc"
    assert hash_block(ROOT, [1, 2, 3, 4], [b"salt", "lora"]).hex() == "ea5340a0f6ad4949ce65867feaf7fdb1"


def test_published_vectors_of_images_hold() -> None:
    image = Image(hash=bytes(range(16)), offset=2, num_tokens=4, height=32, width=32)
    assert [each.hex() for each in hash_blocks(ROOT, [1, 2, 9, 9, 9, 9, 3, 4, 5, 6, 7, 8], 4, ["salt"], [image])] == [
        "dbaffaa901909e6ec87ebd37df4eb63a",
        "851488d9db5c15ce9405ee2b9ca26298",
        "e766b9f4b3852f62c8da5a607d83d7e6",
    ]


def test_published_vector_of_an_audio_that_every_token_reads_holds() -> None:
    keys = extra_keys("salt", "", "", [Audio(hash=bytes(range(16)), num_samples=1)])
    assert [each.hex() for each in hash_blocks(ROOT, [1, 2, 3, 4], 4, keys)] == ["b725934340c043221acf1934610d3bd2"]


def test_published_vectors_of_embeddings_hold() -> None:
    embeds = PromptEmbeds(offset=1, num_tokens=5, type=EmbeddingType.FLOAT16, values=bytes(range(20)))
    assert [each.hex() for each in hash_blocks(ROOT, [1, 0, 0, 0, 0, 0, 2, 3], 4, embeds=[hashed(embeds)])] == [
        "18171111be02588c2ba8efb91fe56038",
        "826fc602fb69e429cd1ecf30b390ddce",
    ]


@given(data=st.data(), sizes=st.lists(st.tuples(st.integers(0, 6), st.integers(1, 9)), max_size=4), extra_keys=keys)
def test_images_and_audios_are_in_the_hashes_of_the_blocks_that_they_touch(
    data: st.DataObject, sizes: list[tuple[int, int]], extra_keys: list[str]
) -> None:
    media, offset = list[Image | Audio](), 0
    for gap, num_tokens in sizes:
        image = Image(hash=data.draw(hashes), offset=offset + gap, num_tokens=num_tokens, height=1, width=1)
        audio = Audio(hash=image.hash, offset=image.offset, num_tokens=num_tokens, num_samples=1)
        media.append(image if data.draw(st.booleans()) else audio)
        offset += gap + num_tokens
    token_ids = list(range(offset + data.draw(st.integers(0, 6))))
    chain, parent = [], ROOT
    for start in range(0, len(token_ids) - 3, 4):
        parent = hash_block(parent, token_ids[start : start + 4], [*extra_keys, *media_keys(media, start, start + 4)])
        chain.append(parent)
    assert hash_blocks(ROOT, token_ids, 4, extra_keys, media) == chain


def test_hash_is_the_documented_bytes() -> None:
    message = ROOT + struct.pack("<4I", 9, 8, 7, 6) + b"\x02\0\0\0" + "é".encode()
    assert hash_block(ROOT, [9, 8, 7, 6], ["é"]) == sha256(message).digest()[:16]


@given(token_ids=st.lists(st.integers(0, 99), max_size=20), extra_keys=keys)
def test_prompt_hashes_chain_over_its_full_blocks(token_ids: list[int], extra_keys: list[str]) -> None:
    chain, parent = [], ROOT
    for start in range(0, len(token_ids) - 3, 4):
        parent = hash_block(parent, token_ids[start : start + 4], extra_keys)
        chain.append(parent)
    assert hash_blocks(ROOT, token_ids, 4, extra_keys) == chain
    assert len(chain) == len(token_ids) // 4


@given(one=st.tuples(ids, keys), other=st.tuples(ids, keys))
def test_different_contents_have_different_hashes(
    one: tuple[list[int], list[str]], other: tuple[list[int], list[str]]
) -> None:
    assert (hash_block(ROOT, *one) == hash_block(ROOT, *other)) == (one == other)


def test_root_hashes_differ_by_model_and_revision() -> None:
    roots = {root_hash("ab", "c"), root_hash("a", "bc"), root_hash("abc", ""), root_hash("", "abc")}
    assert len(roots) == 4


@pytest.mark.parametrize(
    ("num_tokens", "hit", "known", "positions"),
    [
        (1, 0, 0, ()),
        (17, 0, 0, (16,)),
        (1024, 0, 0, (512, 1008, 1024)),
        (350, 0, 288, (288, 336)),
        (350, 0, 240, (336,)),
        (1040, 336, 592, (512, 592, 1024)),
        (1040, 1024, 1024, ()),
    ],
)
def test_published_checkpoints_hold(num_tokens: int, hit: int, known: int, positions: tuple[int, ...]) -> None:
    assert checkpoint_positions(num_tokens, hit, known, 512, 256, 16) == positions


def test_without_an_interval_only_junction_and_prompt_end_are_checkpoints() -> None:
    assert checkpoint_positions(10_000, 0, 4096, 0, 256, 16) == (4096, 9984)


@given(
    num_tokens=st.integers(1, 300),
    shares=st.tuples(st.floats(0, 1), st.floats(0, 1)),
    interval=st.integers(0, 5),
    min_junction=st.integers(0, 40),
    block_size=st.sampled_from([1, 4, 16]),
)
def test_checkpoints_follow_the_rule(
    num_tokens: int, shares: tuple[float, float], interval: int, min_junction: int, block_size: int
) -> None:
    end = (num_tokens - 1) // block_size * block_size
    hit, known = sorted([int(share * end) // block_size * block_size for share in shares])
    interval *= block_size
    expected = [
        position
        for position in range(hit + block_size, num_tokens + 1, block_size)
        if position == end
        or (position == known and position - hit >= min_junction)
        or (interval and position % interval == 0)
    ]
    assert checkpoint_positions(num_tokens, hit, known, interval, min_junction, block_size) == tuple(expected)


def test_ids_beyond_uint32_are_rejected() -> None:
    with pytest.raises(struct.error):
        hash_block(ROOT, [2**32])


def test_hashing_8192_tokens_takes_milliseconds() -> None:
    token_ids = list(range(8192))

    def seconds() -> float:
        start = time.perf_counter()
        hash_blocks(ROOT, token_ids, 16)
        return time.perf_counter() - start

    assert min(seconds() for _ in range(10)) < 0.01  # 0.8 ms on an idle core
