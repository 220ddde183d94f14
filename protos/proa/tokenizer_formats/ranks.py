"""Tokenizers that are lists of byte sequences by rank: Mistral's tekken.json and tiktoken's file, of Kimi's models.

A text is divided by a pattern, then the two neighbours that make the token of the lowest rank are merged until none are
left, so the merges of tokenizer.json follow from the ranks.
"""

import base64
import binascii
from collections.abc import Mapping, Sequence
from typing import Any, Final

from proa.tokenizer_formats.build import AddedToken, Division, byte_level_bpe, merges_of_scores
from proa.tokenizer_formats.byte_alphabet import spell

# Of files from before they had a list of their own; the rest are numbered.
_TEKKEN_SPECIALS: Final = (
    *("<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]"),
    *("[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]", "[IMG_END]", "[PREFIX]", "[MIDDLE]"),
    *("[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[TOOL_CONTENT]"),
)
_HAN_APART: Final = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER_BUT_HAN: Final = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_CONTRACTIONS: Final = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
KIMI_PATTERN: Final = (
    rf"[\p{{Han}}]+|{_HAN_APART}*{_LOWER_BUT_HAN}+{_CONTRACTIONS}|{_HAN_APART}+{_LOWER_BUT_HAN}*{_CONTRACTIONS}"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KIMI_NUM_SPECIALS: Final = 256


def from_tekken(fields: Mapping[str, Any]) -> bytes:
    """tokenizer.json of a tekken.json. Special tokens come before the others. Raises KeyError, TypeError or ValueError
    for fields that are missing or wrong."""
    config = fields["config"]
    num_specials = config["default_num_special_tokens"]
    named = {each["rank"]: each["token_str"] for each in fields.get("special_tokens") or ()}
    named = named or dict(enumerate(_TEKKEN_SPECIALS))
    specials = [AddedToken(rank, named.get(rank, f"<SPECIAL_{rank}>"), is_special=True) for rank in range(num_specials)]
    plain = fields["vocab"][: config["default_vocab_size"] - num_specials]
    tokens = [spell(base64.b64decode(each["token_bytes"])) for each in plain]
    first = next((each for each in specials if each.text == "<s>"), None)
    return _from_ranks(tokens, specials, [each.text for each in specials] + tokens, config["pattern"], first)


def from_tiktoken(data: bytes, tokenizer_config: Mapping[str, Any]) -> bytes:
    """tokenizer.json of Kimi's tiktoken.model: a line for each token, its bytes in base64 and its rank. Special tokens
    come behind the others; `tokenizer_config` names them. Raises ValueError for another file."""
    ranks: dict[int, str] = {}
    for line in data.splitlines():
        token, _, rank = line.partition(b" ")
        try:
            ranks[int(rank)] = spell(base64.b64decode(token, validate=True))
        except (ValueError, binascii.Error) as error:
            raise ValueError(f"tiktoken.model has a line that is no token: {line[:100]!r}") from error
    tokens = [ranks[rank] for rank in range(len(ranks))]
    named = {int(token_id): token for token_id, token in (tokenizer_config.get("added_tokens_decoder") or {}).items()}
    specials = [
        AddedToken(token_id, _content(named.get(token_id), f"<|reserved_token_{token_id}|>"), is_special=True)
        for token_id in range(len(tokens), len(tokens) + KIMI_NUM_SPECIALS)
    ]
    return _from_ranks(tokens, specials, tokens + [each.text for each in specials], KIMI_PATTERN, None)


def _content(token: Any, default: str) -> str:
    return str(token["content"]) if token else default


def _from_ranks(
    tokens: Sequence[str], specials: Sequence[AddedToken], by_id: Sequence[str], pattern: str, first: AddedToken | None
) -> bytes:
    """`tokens`: by rank. `by_id`: with the special ones."""
    merges = merges_of_scores(
        {token: rank for rank, token in enumerate(tokens)}, [-rank for rank in range(len(tokens))]
    )
    return byte_level_bpe(by_id, merges, specials, Division((pattern,)), ignore_merges=True, first=first)
