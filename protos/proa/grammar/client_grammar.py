"""Grammars that a client wrote, in Lark or in EBNF as llama.cpp has it (GBNF)."""

import json
import re

from llguidance.gbnf_to_lark import gbnf_to_lark

from proa.grammar.check import GrammarError
from proa.grammar.json_schema import JsonOptions, json_schema
from proa.grammar.lark import AddedTokens, check_regexes
from proa.grammar.schema_bounds import Findings

MAX_BYTES = 64 * 1024
# llguidance 1.9.1 recurses from a rule into the rules it names and overflows a stack of 8 MiB at 2,660 rules in a row,
# or at 3,400 parentheses in each other.
MAX_LEVELS = 2000
MAX_EBNF_RULES = 300  # gbnf_to_lark takes quadratic time

# All three take linear time: what is not closed ends with the text, and no quantifier gives back what it took.
_LARK = re.compile(r"^[ \t]*+[?!]?start[ \t]*+(?:\[[^\]\n]*+\])?[ \t]*+:(?!:=)|%llguidance", re.MULTILINE)
# What llguidance's lexer takes as one token and may hold what looks like another: string, comment, regular expression,
# special token. And what is looked for.
TOKEN = re.compile(
    r'"(?:\\.|[^"\\\n])*+"?|(?://|#)[^\n]*+|/(?P<regex>(?:\\.|[^/\\])++)/?|(?P<token><[^<>\s]++>)'
    r"|(?P<json>%json)|(?P<level>[(:]|%lark)|(?P<repetition>[?*+~{\[])|(?P<alternative>\|)",
    re.DOTALL,
)
_EBNF_TOKEN = re.compile(r'"(?:\\.|[^"\\\n])*+"?|\[(?:\\.|[^\]\\\n])*+\]?|#[^\n]*+', re.DOTALL)


def client_grammar(text: str, added_tokens: AddedTokens, options: JsonOptions, findings: Findings) -> str:
    """The grammar in Lark, with our options in each `%json`, and the id of each added token in place of its text."""
    if len(text) > MAX_BYTES:
        raise GrammarError(f"a grammar must be at most {MAX_BYTES} characters long, this one has {len(text)}")
    if text.lstrip().startswith("{"):
        raise GrammarError("a grammar must be written in Lark or EBNF, not in JSON")
    return _lark(text if _LARK.search(text) else ebnf_to_lark(text), added_tokens, options, findings)


def _lark(text: str, added_tokens: AddedTokens, options: JsonOptions, findings: Findings) -> str:
    pieces: list[str] = []
    levels = position = end = 0
    while found := TOKEN.search(text, position):
        position = found.end()
        levels += found["level"] is not None
        if found["regex"] is not None:
            findings.regexes.append(found["regex"])
        if (token := found["token"]) is not None and not token.startswith("<["):
            if token not in added_tokens:
                raise GrammarError(f"the tokenizer has no added token {token[:50]}")
            pieces += [text[end : found.start()], f"<[{added_tokens[token]}]>"]
            end = position
        if found["json"] is not None:
            schema, position = decode_json(text, position)
            pieces += [text[end : found.start()], json_schema(schema, options, findings), " "]
            end = position
    if levels > MAX_LEVELS:
        raise GrammarError(f"a grammar must have at most {MAX_LEVELS} rules and parentheses, this one has {levels}")
    check_regexes(findings.regexes)
    return "".join([*pieces, text[end:]])


def decode_json(text: str, start: int) -> tuple[object, int]:
    """The JSON value that begins after whitespace at `start`, and its end."""
    start += len(text[start:]) - len(text[start:].lstrip(" \t\r\n"))
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError) as error:
        raise GrammarError(f"%json must be followed by JSON: {error}") from None
    return value, end


def ebnf_to_lark(text: str) -> str:
    if text.count("::=") > MAX_EBNF_RULES:
        raise GrammarError(f"an EBNF grammar must have at most {MAX_EBNF_RULES} rules")
    if "::=" not in text:
        raise GrammarError('a grammar must be written in Lark, with a rule "start:", or in EBNF, with "root ::="')
    # Three things that gbnf_to_lark 1.9.1 does not read.
    text = _EBNF_TOKEN.sub(_repair_token, text)
    text = re.sub(r"\n[ \t]*+\|", " |", text)
    try:
        return gbnf_to_lark(text)
    except RecursionError:
        raise GrammarError("the EBNF grammar is nested too deeply") from None
    except Exception as error:  # gbnf_to_lark raises no narrower one
        raise GrammarError(f"EBNF grammar: {error}") from None


def _repair_token(found: re.Match[str]) -> str:
    token = found[0]
    if token.startswith("#"):
        return ""
    token = re.sub(r"\\(?:u([0-9a-fA-F]{4})|(.))", _repair_escape, token)
    return token.replace(r"\-", r"\x2d") if token.startswith("[") else token


def _repair_escape(found: re.Match[str]) -> str:
    character = chr(int(found[1], 16)) if found[1] else ""
    # What has a meaning in a string or class, and what cannot be written as itself, stays an escape.
    return character if character.isprintable() and character not in '"\\[]^-' and character else found[0]
