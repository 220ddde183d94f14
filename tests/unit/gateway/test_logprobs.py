"""What tokens are called in log probabilities."""

import pytest

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.serving.logprobs import CompletionLogprobs, chat_logprobs, token_names
from support.tokenizers import byte_level_tokenizer

VOCABULARY = Vocabulary(byte_level_tokenizer())
IDS = [byte_level_tokenizer().token_to_id(name) or 0 for name in "Ã©âa"]  # how the tokenizer writes single bytes
ENTRY = TokenLogprobs(IDS[0], -0.5, 1, tuple(IDS), (-0.5, -1.0, -2.0, -3.0))
NAMES = [r"bytes:\xc3", r"bytes:\xa9", r"bytes:\xe2", "a"]


def test_byte_tokens_keep_their_entries_in_completions() -> None:
    names = token_names(VOCABULARY, as_token_ids=False, shows_bytes=True)
    lists = CompletionLogprobs(VOCABULARY, names, skip_special_tokens=True).render([ENTRY])
    assert lists["tokens"] == NAMES[:1]
    assert lists["top_logprobs"] == [dict(zip(NAMES, ENTRY.top_logprobs, strict=True))]


@pytest.mark.parametrize("as_token_ids", [False, True])
def test_chats_name_bytes_beside_the_text(as_token_ids: bool) -> None:
    names = token_names(VOCABULARY, as_token_ids=as_token_ids)
    (entry,) = chat_logprobs([ENTRY], vocabulary=VOCABULARY, name=names, adds_sampled=False)["content"]
    assert b"".join(bytes(top["bytes"]) for top in entry["top_logprobs"]).decode("latin-1") == "Ã©âa"
    assert entry["token"] == (f"token_id:{IDS[0]}" if as_token_ids else "�")
