"""Grammars of requests with llguidance: compiling them, following outputs, and masks of what outputs may continue with.

Implements the interfaces of `proa_engine.core.grammar`.
"""

from proa_engine.grammar.compiler import NO_LIMITS, SERVING_LIMITS, QueueLimits
from proa_engine.grammar.grammars import LLGuidanceGrammars
from proa_engine.grammar.tokenizer import GrammarTokenizer, make_tokenizer

__all__ = [
    "NO_LIMITS",
    "SERVING_LIMITS",
    "GrammarTokenizer",
    "LLGuidanceGrammars",
    "QueueLimits",
    "make_tokenizer",
]
