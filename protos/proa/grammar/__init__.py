"""Lower every form of structured output to one grammar in llguidance's Lark dialect, and check it. Pure functions."""

from proa.grammar.check import GrammarError, check
from proa.grammar.lower import Lowered, lower

__all__ = ["GrammarError", "Lowered", "check", "lower"]
