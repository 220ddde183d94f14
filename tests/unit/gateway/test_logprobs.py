"""What tokens are called in log probabilities."""

import math
import random

import orjson
import pytest

from proa.contract import TokenLogprobs
from proa.text import Vocabulary
from proa_gateway.output.logprob_columns import LogprobColumns
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
    assert orjson.loads(orjson.dumps(lists["top_logprobs"])) == [dict(zip(NAMES, ENTRY.top_logprobs, strict=True))]


@pytest.mark.parametrize("as_token_ids", [False, True])
def test_chats_name_bytes_beside_the_text(as_token_ids: bool) -> None:
    names = token_names(VOCABULARY, as_token_ids=as_token_ids)
    (entry,) = chat_logprobs([ENTRY], vocabulary=VOCABULARY, name=names, adds_sampled=False)["content"]
    assert b"".join(bytes(top["bytes"]) for top in entry["top_logprobs"]).decode("latin-1") == "Ã©âa"
    assert entry["token"] == (f"token_id:{IDS[0]}" if as_token_ids else "�")


def test_columns_give_back_the_entries_that_they_took() -> None:
    """Values are float32, as they come from an engine."""
    rng = random.Random(1)
    entries = [
        TokenLogprobs(
            rng.randrange(2**32),
            -rng.randrange(1000) / 8,
            rng.randrange(1, 200_000),
            [rng.randrange(2**32) for _ in range(count)],
            [-rng.randrange(1000) / 8 for _ in range(count)],
        )
        for count in (0, 3, 20, 0, 1)
    ]
    entries[1].logprob = -math.inf
    columns = LogprobColumns(entries[:2])
    columns.extend(entries[2:])
    assert list(columns) == entries
    assert (len(columns), columns[0], columns[-1], list(columns[1:4])) == (5, entries[0], entries[-1], entries[1:4])
    assert not LogprobColumns()
