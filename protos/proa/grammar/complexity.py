"""check_complexity: bounds on what a grammar in Lark costs to compile, also if `lower` did not write it."""

from collections.abc import Mapping

from proa.grammar.check import GrammarError
from proa.grammar.client_grammar import TOKEN, decode_json
from proa.grammar.json_schema import check_schema
from proa.grammar.lark import check_regexes
from proa.grammar.schema_bounds import Findings

# Rules, terminals, parentheses and repetitions. With llguidance 1.9.1, 8,000 repetitions in one terminal take 2.7 s and
# 170 MB, 50,000 take minutes and 3 GB; 8,000 rules, each naming the next, need a stack of 32 MiB.
MAX_PARTS = 8000
# Rules of many strings take quadratic time: 20,000 alternatives 0.8 s, 43,000 in 256 KiB several seconds.
MAX_ALTERNATIVES = 20_000


def check_complexity(text: str) -> None:
    """Raises `GrammarError` for a grammar that takes too much time, memory or stack to compile; does not compile it.

    What it accepts compiles in seconds, on a stack of 64 MiB.
    """
    if text.lstrip().startswith("{"):
        raise GrammarError("a grammar must be written in Lark")
    findings = Findings()
    num_parts = num_alternatives = position = 0
    while found := TOKEN.search(text, position):
        position = found.end()
        num_parts += found["level"] is not None or found["repetition"] is not None
        num_alternatives += found["alternative"] is not None
        if (regex := found["regex"]) is not None:
            findings.regexes.append(regex.replace("[0-9]", r"\d").replace(r"\/", "/"))  # as before `regex_to_lark`
        if found["json"] is not None:
            schema, position = decode_json(text, position)
            if isinstance(schema, dict):
                check_schema(schema, findings)
                _check_whitespace(schema.get("x-guidance"))
    if num_parts > MAX_PARTS:
        raise GrammarError(f"a grammar must have at most {MAX_PARTS} rules, parentheses and repetitions")
    if num_alternatives > MAX_ALTERNATIVES:
        raise GrammarError(f"a grammar must have at most {MAX_ALTERNATIVES} alternatives")
    check_regexes(findings.regexes)


def _check_whitespace(options: object) -> None:
    pattern = options.get("whitespace_pattern") if isinstance(options, Mapping) else None
    if isinstance(pattern, str):
        check_regexes([pattern])
