"""Whether a lowered grammar accepts a text, with a small tokenizer that has added tokens."""

from functools import cache

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from tokenizers import Tokenizer

from proa.contract import Grammar, StructuredOutputsParams
from proa.grammar import check, lower
from support.tokenizers import byte_level_tokenizer

LIMITS = LLParserLimits(max_lexer_states=30_000, verbose_errors=False)


@cache
def tokenizers() -> tuple[Tokenizer, LLTokenizer]:
    tokenizer = byte_level_tokenizer()
    return tokenizer, LLTokenizer(tokenizer.to_str(), n_vocab=tokenizer.get_vocab_size(), eos_token=0)


def added_tokens() -> dict[str, int]:
    return {token.content: token_id for token_id, token in tokenizers()[0].get_added_tokens_decoder().items()}


def lowered(*, strict: bool = False, **fields: object) -> Grammar:
    """The grammar of `StructuredOutputsParams(**fields)`, checked."""
    params = StructuredOutputsParams(**fields)  # type: ignore[arg-type]
    grammar = lower(params, added_tokens(), strict=strict).grammar
    check(grammar.text)
    return grammar


def accepts(grammar: Grammar, text: str) -> bool:
    """Whether the tokens of the text, encoded as a model would write it, are a complete output."""
    tokenizer, ll_tokenizer = tokenizers()
    matcher = LLMatcher(ll_tokenizer, grammar.text, log_level=0, limits=LIMITS)
    assert not matcher.is_error(), matcher.get_error()
    token_ids = tokenizer.encode(text).ids
    return matcher.try_consume_tokens(token_ids) == len(token_ids) and matcher.is_accepting()
