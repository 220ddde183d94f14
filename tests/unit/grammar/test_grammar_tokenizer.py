"""The tokenizer of grammars agrees with the detokenizer, and its masks have a bit for every logit."""

import numpy as np
import pytest
from tokenizers import Tokenizer

from proa.detokenizer import Vocabulary
from proa_engine.grammar.masks import allow, forbid, num_words
from proa_engine.grammar.tokenizer import make_tokenizer
from support.tokenizers import byte_level_tokenizer, metaspace_tokenizer

FAMILIES = {
    "byte level": byte_level_tokenizer(),
    "metaspace": metaspace_tokenizer(),
    "metaspace without strip": metaspace_tokenizer(strip=False),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_have_the_bytes_that_they_add_to_a_text(family: str) -> None:
    tokenizer = FAMILIES[family]
    vocabulary = Vocabulary(tokenizer)
    made = make_tokenizer(tokenizer.to_str().encode(), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=[0])

    assert made is not None
    special = {tokenizer.token_to_id(text) for text in ("<eos>", "<think>")}
    for token_id in set(range(tokenizer.get_vocab_size())) - special:
        expected = vocabulary.token_bytes(token_id)
        # llguidance uses the byte 0xFF, which no UTF-8 text has, as a mark of special tokens.
        assert made.decode_bytes([token_id]) == (b"" if expected == b"\xff" else expected)


@pytest.mark.parametrize("family", FAMILIES)
def test_special_tokens_have_no_text_and_their_ids(family: str) -> None:
    tokenizer = FAMILIES[family]
    made = make_tokenizer(tokenizer.to_str().encode(), vocab_size=tokenizer.get_vocab_size(), eos_token_ids=[0])

    assert made is not None
    for token_id, token in tokenizer.get_added_tokens_decoder().items():
        is_text = token.content == "added Ω token"
        assert made.decode_bytes([token_id]).decode() == (token.content if is_text else f"\ue000{token_id}\ue000")
        assert token_id not in made.tokenize_str(f"a{token.content}b") or is_text


@pytest.mark.parametrize("vocab_size", [100, 400, 500])
def test_masks_have_a_bit_for_every_logit_and_every_token(vocab_size: int) -> None:
    tokenizer = metaspace_tokenizer(vocab_size=400)

    made = make_tokenizer(tokenizer.to_str().encode(), vocab_size=vocab_size, eos_token_ids=[0])

    assert made is not None
    assert made.vocab_size == max(vocab_size, tokenizer.get_vocab_size())
    assert num_words(made) == -(-made.vocab_size // 32)


def test_all_end_tokens_end_a_grammar() -> None:
    tokenizer = byte_level_tokenizer()

    made = make_tokenizer(tokenizer.to_str().encode(), vocab_size=400, eos_token_ids={7, 0})

    assert made is not None
    assert made.eos_tokens == [0, 7]


def test_unreadable_tokenizer_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_str(byte_level_tokenizer().to_str())
    tokenizer.decoder = None

    assert make_tokenizer(tokenizer.to_str().encode(), vocab_size=400, eos_token_ids=[0]) is None
    assert "requests with grammars will be refused" in caplog.text


def test_bits_of_tokens() -> None:
    mask = np.zeros(3, np.uint32)

    allow(mask, [0, 31, 32, 95])
    forbid(mask, [0, 1, 95])

    assert mask.tolist() == [1 << 31, 1, 0]
