"""Texts and pairs as token ids, against the tokenizers library's own truncation."""

from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from proa_gateway.pooling.inputs import Limit, encode_pairs, encode_texts, first_tokens
from support.tokenizers import byte_level_tokenizer

LONG, SHORT = "The quick brown fox jumps over the lazy dog. " * 3, "one two"


@pytest.fixture(params=["types", "no types", "end only"])
def tokenizer(request: pytest.FixtureRequest) -> Tokenizer:
    """With the special tokens of BERT, of RoBERTa, which has no segments, and of Qwen3-Embedding."""
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    single, pair = {
        "types": ("[CLS] $A [SEP]", "[CLS] $A [SEP] $B:1 [SEP]:1"),
        "no types": ("[CLS] $A [SEP]", "[CLS] $A [SEP] [SEP] $B [SEP]"),
        "end only": ("$A [SEP]", "$A $B:1 [SEP]:1"),
    }[request.param]
    ids = [(token, tokenizer.token_to_id(token)) for token in ("[CLS]", "[SEP]")]
    tokenizer.post_processor = TemplateProcessing(single=single, pair=pair, special_tokens=ids)
    return tokenizer


def truncating(tokenizer: Tokenizer, max_length: int, direction: str) -> Tokenizer:
    copy = Tokenizer.from_str(tokenizer.to_str())
    copy.enable_truncation(max_length, strategy="longest_first", direction=direction)
    return copy


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [3, 7, 20, 500])
def test_texts_are_cut_as_the_library_cuts_them(tokenizer: Tokenizer, max_tokens: int, side: Any) -> None:
    reference = truncating(tokenizer, max_tokens, side)
    encoded = encode_texts(tokenizer, [LONG, SHORT], Limit(max_tokens, side), add_special_tokens=True)
    assert list(map(list, encoded)) == [reference.encode(text).ids for text in (LONG, SHORT)]


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("max_tokens", [6, 13, 40, 500])
@pytest.mark.parametrize("pair", [(LONG, SHORT), (SHORT, LONG), (LONG, LONG), (SHORT, SHORT)])
def test_pairs_are_cut_as_the_library_cuts_them(
    tokenizer: Tokenizer, pair: tuple[str, str], max_tokens: int, side: Any
) -> None:
    expected = truncating(tokenizer, max_tokens, side).encode(*pair)
    (encoded,) = encode_pairs(tokenizer, [pair], Limit(max_tokens, side))
    assert list(encoded.token_ids) == expected.ids
    types = expected.type_ids
    assert encoded.second_start == (types.index(1) if 1 in types else None)


def test_a_limit_below_the_special_tokens_is_kept(tokenizer: Tokenizer) -> None:
    (ids,) = encode_texts(tokenizer, [LONG], Limit(1), add_special_tokens=True)
    assert len(ids) == 1


def test_texts_end_after_so_many_tokens(tokenizer: Tokenizer) -> None:
    texts = first_tokens(tokenizer, [LONG, SHORT], 4)
    ids = tokenizer.encode(LONG, add_special_tokens=False).ids
    assert tokenizer.encode(texts[0], add_special_tokens=False).ids == ids[:4]
    assert texts[1] == SHORT
