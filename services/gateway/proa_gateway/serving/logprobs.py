"""Log probabilities in three JSON forms: OpenAI's for chat, OpenAI's for completions, vLLM's for prompts."""

from codecs import getincrementaldecoder
from collections.abc import Callable, Sequence
from typing import Any

import orjson

from proa.contract import TokenLogprobs
from proa.text import Vocabulary

# In place of minus infinity, which JSON lacks; as in vLLM.
LOWEST = -9999.0
TokenName = Callable[[int], str]
"""What a token is called in the response, by its id."""
ChatLogprobs = Callable[[Sequence[TokenLogprobs]], dict[str, Any]]
"""`chat_logprobs` as a request wants them."""
_Utf8Decoder = getincrementaldecoder("utf-8")


def token_names(vocabulary: Vocabulary, *, as_token_ids: bool, shows_bytes: bool = False) -> TokenName:
    """Names are the tokens' texts, or with `as_token_ids` vLLM's `token_id:5`, which no two tokens share.

    `shows_bytes`: a token whose bytes are not UTF-8 is called `bytes:\\xe2\\x80`, as in OpenAI's completions, whose
    `top_logprobs` are by name. Else all such tokens have the same text.
    """
    if as_token_ids:
        return "token_id:{}".format
    name = _text_or_bytes if shows_bytes else _text
    return lambda token_id: name(token_id, vocabulary)


def chat_logprobs(
    entries: Sequence[TokenLogprobs], *, vocabulary: Vocabulary, name: TokenName, adds_sampled: bool
) -> dict[str, Any]:
    """`adds_sampled`: the sampled token is among the alternatives, also if it is none of them."""
    return {"content": [_chat_entry(entry, vocabulary, name, adds_sampled=adds_sampled) for entry in entries]}


def prompt_logprobs(entries: Sequence[TokenLogprobs], vocabulary: Vocabulary) -> orjson.Fragment:
    """JSON of a list that has for each prompt token an object of token id -> entry, and null for the first token, which
    has no logprob. As dicts they would take six times as much memory."""
    parts = [b"null", *(orjson.dumps(_by_token_id(entry, vocabulary)) for entry in entries)]
    return orjson.Fragment(b"[" + b",".join(parts) + b"]")


class CompletionLogprobs:
    """The parallel lists of `/v1/completions`. Tracks `text_offset`, so tokens must come in order."""

    def __init__(self, vocabulary: Vocabulary, name: TokenName, *, skip_special_tokens: bool) -> None:
        self._vocabulary = vocabulary
        self._name = name
        self._skip = skip_special_tokens  # special tokens do not count in `_offset`
        self._offset = 0  # characters
        self._decoder = _Utf8Decoder("replace")  # a character may be spread over several tokens

    def render_prompt(self, token_ids: Sequence[int], entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The lists of an echoed prompt. `entries`: of all its tokens but the first, which has no logprob."""
        first: dict[str, list[Any]] = {
            "tokens": [self._name(token_ids[0])],
            "token_logprobs": [None],
            "top_logprobs": [None],
            "text_offset": [self._next_offset(token_ids[0])],
        }
        return join(first, self.render(entries))

    def render(self, entries: Sequence[TokenLogprobs]) -> dict[str, list[Any]]:
        """The alternatives are JSON already: as dicts they would take six times as much memory."""
        return {
            "tokens": [self._name(entry.token_id) for entry in entries],
            "token_logprobs": [finite(entry.logprob) for entry in entries],
            "top_logprobs": [orjson.Fragment(orjson.dumps(_tops(entry, self._name))) for entry in entries],
            "text_offset": [self._next_offset(entry.token_id) for entry in entries],
        }

    def _next_offset(self, token_id: int) -> int:
        offset = self._offset
        if not self._vocabulary.is_skipped(token_id, self._skip):
            self._offset += len(self._decoder.decode(self._vocabulary.token_bytes(token_id)))
        return offset


def join(first: dict[str, list[Any]], second: dict[str, list[Any]]) -> dict[str, list[Any]]:
    return {name: first[name] + second[name] for name in first}


def _chat_entry(entry: TokenLogprobs, vocabulary: Vocabulary, name: TokenName, *, adds_sampled: bool) -> dict[str, Any]:
    sampled = _chat_token(entry.token_id, entry.logprob, vocabulary, name)
    tops = [_chat_token(token_id, logprob, vocabulary, name) for token_id, logprob in _pairs(entry)]
    if adds_sampled and entry.token_id not in entry.top_token_ids:
        tops.insert(0, sampled)
    return {**sampled, "top_logprobs": tops}


def _chat_token(token_id: int, logprob: float, vocabulary: Vocabulary, name: TokenName) -> dict[str, Any]:
    data = list(vocabulary.token_bytes(token_id))
    return {"token": name(token_id), "logprob": finite(logprob), "bytes": data}


def _tops(entry: TokenLogprobs, name: TokenName) -> dict[str, float]:
    """The likeliest tokens and the sampled one. Of tokens with the same name, the likelier one is kept."""
    tops = {name(entry.token_id): finite(entry.logprob)}
    for token_id, logprob in _pairs(entry):
        text = name(token_id)
        tops[text] = max(finite(logprob), tops.get(text, LOWEST))
    return tops


def _by_token_id(entry: TokenLogprobs, vocabulary: Vocabulary) -> dict[str, Any]:
    ranked = {token_id: (logprob, rank) for rank, (token_id, logprob) in enumerate(_pairs(entry), start=1)}
    ranked[entry.token_id] = (entry.logprob, entry.rank)
    return {
        str(token_id): {"logprob": finite(logprob), "rank": rank, "decoded_token": _text(token_id, vocabulary)}
        for token_id, (logprob, rank) in ranked.items()
    }


def _pairs(entry: TokenLogprobs) -> list[tuple[int, float]]:
    return list(zip(entry.top_token_ids, entry.top_logprobs, strict=True))


def _text(token_id: int, vocabulary: Vocabulary) -> str:
    return vocabulary.token_bytes(token_id).decode(errors="replace")


def _text_or_bytes(token_id: int, vocabulary: Vocabulary) -> str:
    data = vocabulary.token_bytes(token_id)
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def finite(logprob: float) -> float:
    return max(logprob, LOWEST)
