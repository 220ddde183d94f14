"""Lower every form of structured output to one grammar in llguidance's Lark dialect, and check it. Pure functions."""

from proa.grammar.check import GrammarError, check, clean, is_panic
from proa.grammar.complexity import check_complexity
from proa.grammar.lower import Lowered, lower

__all__ = ["GrammarError", "Lowered", "check", "check_complexity", "clean", "is_panic", "lower"]
