"""Messages under the grammar of a tool format, with a small tokenizer that has the format's tokens."""

import json
from collections.abc import Sequence
from copy import copy
from functools import cache, lru_cache
from itertools import groupby
from random import Random

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from proa.contract import Grammar
from proa_engine.builtin import builtin_model_folder
from proa_engine.core.grammar import GrammarCursor, Part
from proa_engine.grammar.failures import failure
from proa_gateway.output.text import Delta
from proa_gateway.parsing.call_reader import Schemas
from proa_gateway.parsing.compiled_format import compile_format
from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.parser import ResponseParser
from support.grammars import LIMITS
from support.messages import Message, MessageCollector
from support.tokenizers import byte_level_tokenizer

EOS = 0


class FormatTokenizer:
    """A tokenizer with some more tokens."""

    def __init__(self, tokenizer: Tokenizer, tokens: tuple[str, ...]) -> None:
        self.tokenizer = tokenizer
        self.tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
        self.for_grammars = LLTokenizer(self.tokenizer.to_str(), n_vocab=self.tokenizer.get_vocab_size(), eos_token=EOS)

    @property
    def added_tokens(self) -> dict[str, int]:
        tokens = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in tokens}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


def fresh_format_tokenizer(*tokens: str) -> FormatTokenizer:
    return FormatTokenizer(byte_level_tokenizer(), tokens)


format_tokenizer = cache(fresh_format_tokenizer)


@cache
def builtin_format_tokenizer(*tokens: str) -> FormatTokenizer:
    """With the tokenizer of the built-in model, of 2,048 tokens, without the tokens of its own format."""
    saved = json.loads((builtin_model_folder() / "tokenizer.json").read_text())
    saved["added_tokens"] = [token for token in saved["added_tokens"] if "tool_call" not in token["content"]]
    return FormatTokenizer(Tokenizer.from_str(json.dumps(saved)), tokens)


@lru_cache(maxsize=1)
def _fresh_matcher(grammar: Grammar, tokenizer: FormatTokenizer) -> LLMatcher:
    """Tests ask about several texts under one grammar, whose compilation takes longer than a text."""
    matcher = LLMatcher(tokenizer.for_grammars, grammar.text, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    return matcher


class TestMatcher:
    """The core's `Matcher`, by llguidance."""

    __test__ = False

    def __init__(self, grammar: Grammar, tokenizer: FormatTokenizer) -> None:
        self.matcher = _fresh_matcher(grammar, tokenizer).deep_copy()

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def is_done(self) -> bool:
        return self.matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        return self.matcher.try_consume_tokens([token_id]) == 1

    @property
    def error(self) -> str:
        return failure(self.matcher)

    def restart(self) -> None:
        self.matcher.reset()

    def copy(self) -> "TestMatcher":
        copied = copy(self)
        copied.matcher = self.matcher.deep_copy()
        return copied

    def forced(self) -> list[int]:
        return self.matcher.compute_ff_tokens()


def accepts_message(grammar: Grammar, text: str, tokenizer: FormatTokenizer) -> bool:
    """Whether the text is a whole message under the grammar."""
    matcher = TestMatcher(grammar, tokenizer)
    cursor = GrammarCursor(grammar, matcher)
    if not all(cursor.accept(token_id) for token_id in tokenizer.encode(text)):
        return False
    if cursor.part is Part.BOUND:
        return matcher.is_accepting or cursor.is_complete
    return grammar.repeats  # no end is allowed while the output is free before the grammar


def random_message(grammar: Grammar, tokenizer: FormatTokenizer, random: Random, exits: Sequence[str]) -> list[int]:
    """Tokens of a whole message that the grammar allows from its first token on.

    `exits`: texts that end strings and values, tried more often than by chance, so that the message has an end.
    """
    matcher = TestMatcher(grammar, tokenizer).matcher
    ways_out = [tokenizer.encode(text) for text in exits]
    ids: list[int] = []
    while not matcher.is_stopped():
        if random.random() < (0.3 if len(ids) < 200 else 0.9):
            way_out = random.choice(ways_out)
            ids += way_out[: matcher.try_consume_tokens(way_out)]
            continue
        allowed = [id for id, bias in enumerate(matcher.compute_logit_bias()) if bias]
        if EOS in allowed and (allowed == [EOS] or random.random() < 0.5):
            break
        token_id = random.choice([id for id in allowed if id != EOS])
        assert matcher.try_consume_tokens([token_id]) == 1, matcher.get_error()
        ids.append(token_id)
        assert len(ids) < 20_000
    return ids


def parse_message(
    tool_format: ToolFormat, token_ids: Sequence[int], tokenizer: FormatTokenizer, schemas: Schemas
) -> Message:
    """The message of these tokens. Of the tokenizer's tokens, the format's are given to the parser as ids."""
    compiled = compile_format(tool_format, tokenizer.added_tokens, calls=True)
    parser, collector = ResponseParser(compiled, schemas, reasoning_open=False), MessageCollector()
    for is_marker, run in groupby(token_ids, key=lambda token_id: token_id in compiled.markers):
        for ids in [[token_id] for token_id in run] if is_marker else [list(run)]:
            text = tokenizer.tokenizer.decode(ids, skip_special_tokens=False)
            collector.events(parser.marker(ids[0]) if is_marker else parser.text(text), Delta())
    collector.events(parser.finish(), Delta())
    return collector.message
