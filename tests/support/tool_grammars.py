"""Messages under the grammar of a tool format, with a small tokenizer that has the format's tokens."""

from functools import cache

from llguidance import LLMatcher, LLTokenizer
from tokenizers import AddedToken, Tokenizer

from proa.contract import Grammar
from proa_engine.core.grammar import GrammarCursor, Part
from support.grammars import LIMITS
from support.tokenizers import byte_level_tokenizer

EOS = 0


class FormatTokenizer:
    """The byte-level tokenizer with some more tokens."""

    def __init__(self, tokens: tuple[str, ...]) -> None:
        self.tokenizer: Tokenizer = byte_level_tokenizer()
        self.tokenizer.add_tokens([AddedToken(token, special=True) for token in tokens])
        self.for_grammars = LLTokenizer(self.tokenizer.to_str(), n_vocab=self.tokenizer.get_vocab_size(), eos_token=EOS)

    @property
    def added_tokens(self) -> dict[str, int]:
        tokens = self.tokenizer.get_added_tokens_decoder().items()
        return {token.content: token_id for token_id, token in tokens}

    def encode(self, text: str) -> list[int]:
        return self.tokenizer.encode(text).ids


@cache
def format_tokenizer(*tokens: str) -> FormatTokenizer:
    return FormatTokenizer(tokens)


class TestMatcher:
    """The core's `Matcher`, by llguidance."""

    __test__ = False

    def __init__(self, grammar: Grammar, tokenizer: FormatTokenizer) -> None:
        self.matcher = LLMatcher(tokenizer.for_grammars, grammar.text, log_level=0, limits=LIMITS)
        assert not self.matcher.is_error(), self.matcher.get_error()

    @property
    def is_accepting(self) -> bool:
        return self.matcher.is_accepting()

    @property
    def is_done(self) -> bool:
        return self.matcher.is_stopped()

    def accept(self, token_id: int) -> bool:
        return self.matcher.try_consume_tokens([token_id]) == 1

    def restart(self) -> None:
        self.matcher.reset()


def accepts_message(grammar: Grammar, text: str, tokenizer: FormatTokenizer) -> bool:
    """Whether the text is a whole message under the grammar."""
    matcher = TestMatcher(grammar, tokenizer)
    cursor = GrammarCursor(grammar, matcher)
    if not all(cursor.accept(token_id) for token_id in tokenizer.encode(text)):
        return False
    if cursor.part is Part.BOUND:
        return matcher.is_accepting or cursor.is_complete
    return grammar.repeats  # no end is allowed while the output is free before the grammar
