"""Structural tags of xgrammar and vLLM, old and new form, as grammars.

Text is free in `any_text` and around `triggered_tags`. Free text ends with the whole output or with the end of the tag
that it is the content of; elsewhere it is refused, because what follows it could not be told from it.
"""

import json
from collections.abc import Callable, Mapping, Sequence

from proa.contract.grammar import Grammar
from proa.grammar.check import GrammarError
from proa.grammar.client_grammar import client_grammar
from proa.grammar.json_schema import JsonOptions, json_schema
from proa.grammar.lark import AddedTokens, check_regexes, literal, quote, regex, split
from proa.grammar.schema_bounds import Findings

Format = Mapping[str, object]

MAX_DEPTH = 20
TEXT = "TEXT: /(?s:.*)/"


def refuse(form: Format, known: set[str], kind: str) -> None:
    for name, value in form.items():
        if name not in known and value not in (None, False, [], ""):
            raise GrammarError(f"structural_tag: {name[:50]} of {kind} is not supported")


def string(form: Format, name: str) -> str:
    value = form.get(name)
    if not isinstance(value, str):
        raise GrammarError(f"structural_tag: {name} must be a string")
    return value


def strings(form: Format, name: str) -> list[str]:
    values = form.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, str) and value for value in values):
        raise GrammarError(f"structural_tag: {name} must be an array of strings that are not empty")
    return values


def object_(form: Format, name: str) -> Format:
    value = form.get(name)
    if not isinstance(value, Mapping):
        raise GrammarError(f"structural_tag: {name} must be an object")
    return value


def objects(form: Format, name: str) -> list[Format]:
    values = form.get(name)
    if not isinstance(values, list) or not values or not all(isinstance(value, Mapping) for value in values):
        raise GrammarError(f"structural_tag: {name} must be an array of objects")
    return values


def structural_tag(tag: str | Format, added_tokens: AddedTokens, options: JsonOptions, findings: Findings) -> Grammar:
    """Triggers that are one and the same added token leave the output free until that token; see `Grammar`."""
    lowering = _Lowering(added_tokens, options, findings)
    form = _format_of(tag)
    if (token_id := lowering.only_trigger(form)) is not None:
        body = lowering.bodies(objects(form, "tags"), strings(form, "triggers")[0])
        return Grammar(text=lowering.grammar(body), start_after=(token_id,), repeats=True)
    return Grammar(text=lowering.grammar(lowering.lower(form, is_last=True)))


def _format_of(tag: object) -> Format:
    if isinstance(tag, str):
        try:
            tag = json.loads(tag)
        except (ValueError, RecursionError) as error:
            raise GrammarError(f"structural_tag is not JSON: {error}") from None
    if not isinstance(tag, Mapping):
        raise GrammarError("structural_tag must be an object")
    if "structures" not in tag:
        return object_(tag, "format")
    tags = [
        {"begin": string(each, "begin"), "end": string(each, "end"), "content": _schema(each)}
        for each in objects(tag, "structures")
    ]
    return {"type": "triggered_tags", "triggers": strings(tag, "triggers"), "tags": tags}


def _schema(structure: Format) -> Format:
    return {"type": "json_schema", "json_schema": structure.get("schema", True)}


class _Lowering:
    """Collects the rules that expressions need."""

    def __init__(self, added_tokens: AddedTokens, options: JsonOptions, findings: Findings) -> None:
        self._added_tokens = added_tokens
        self._options = options
        self._findings = findings
        self._rules: list[str] = []
        self._depth = 0
        self._by_type: dict[str, Callable[[Format], str]] = {
            "const_string": lambda form: self._literal(string(form, "value")),
            "json_schema": self._json_schema,
            "regex": self._regex,
            "grammar": self._grammar,
            "or": lambda form: self._any(objects(form, "elements")),
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
            "optional": lambda form: f"({self.lower(object_(form, 'content'))})?",
            "star": lambda form: f"({self.lower(object_(form, 'content'))})*",
            "plus": lambda form: f"({self.lower(object_(form, 'content'))})+",
        }

    def grammar(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, TEXT, ""])

    def lower(self, form: Format, *, is_last: bool = False) -> str:
        """An expression. `is_last`: nothing follows it, so it may end with free text."""
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise GrammarError(f"structural_tag must be nested at most {MAX_DEPTH} levels deep")
        kind = string(form, "type")
        if kind == "sequence":
            *first, last = objects(form, "elements")
            expression = " ".join([*map(self.lower, first), self.lower(last, is_last=is_last)])
        elif kind in ("any_text", "triggered_tags"):
            refuse(form, {"type", "triggers", "tags", "at_least_one", "stop_after_first"}, kind)
            if not is_last:
                raise GrammarError(f"structural_tag: {kind} must be last, or any_text the content of a tag")
            expression = "TEXT" if kind == "any_text" else self._triggered_tags(form)
        elif kind in self._by_type:
            expression = self._by_type[kind](form)
        else:
            raise GrammarError(f"structural_tag: type {kind[:50]!r} is not supported")
        self._depth -= 1
        return f"({expression})"

    def only_trigger(self, form: Format) -> int | None:
        """The id of the added token that is the only trigger, of any number of tags in free text."""
        if form.get("type") != "triggered_tags" or form.get("at_least_one") or form.get("stop_after_first"):
            return None
        refuse(form, {"type", "triggers", "tags", "at_least_one", "stop_after_first"}, "triggered_tags")
        triggers = strings(form, "triggers")
        return self._added_tokens.get(triggers[0]) if len(triggers) == 1 else None

    def bodies(self, tags: Sequence[Format], trigger: str) -> str:
        """The tags that begin with the trigger, without it."""
        matching = [tag for tag in tags if string(tag, "begin").startswith(trigger)]
        if not matching:
            raise GrammarError(f"structural_tag: no tag begins with the trigger {trigger[:50]!r}")
        return f"({' | '.join(self._tag(tag, skip=len(trigger)) for tag in matching)})"

    def _literal(self, text: str) -> str:
        return literal(text, self._added_tokens)

    def _ids(self, text: str) -> list[int]:
        return [token_id for _, token_id in split(text, self._added_tokens) if token_id is not None]

    def _add_rule(self, attributes: str, body: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}{attributes}: {body}")
        return name

    def _any(self, forms: Sequence[Format]) -> str:
        return " | ".join(map(self.lower, forms))

    def _json_schema(self, form: Format) -> str:
        refuse(form, {"type", "json_schema", "style"}, "json_schema")
        if (style := form.get("style", "json")) != "json":
            raise GrammarError(f"structural_tag: style {style!r} of json_schema is not supported")
        return self._add_rule("", json_schema(form.get("json_schema", True), self._options, self._findings))

    def _regex(self, form: Format) -> str:
        self._findings.regexes.append(string(form, "pattern"))
        check_regexes(self._findings.regexes)
        return regex(string(form, "pattern"))

    def _grammar(self, form: Format) -> str:
        text = client_grammar(string(form, "grammar"), self._added_tokens, self._options, self._findings)
        return self._add_rule("", f"%lark {{\n{text}\n}}")

    def _tag(self, tag: Format, skip: int = 0) -> str:
        """`skip`: characters of `begin` that are left out."""
        trigger, begin = string(tag, "begin")[:skip], string(tag, "begin")[skip:]
        if self._ids(trigger + begin) != self._ids(trigger) + self._ids(begin):
            raise GrammarError(f"structural_tag: the trigger {trigger[:50]!r} ends inside of a token of the tokenizer")
        ends = [tag["end"]] if isinstance(tag.get("end"), str) else strings(tag, "end")
        content = object_(tag, "content")
        head = self._literal(begin) + " " if begin else ""
        if content.get("type") == "any_text":
            refuse(content, {"type"}, "any_text")
            return head + self._text_until([str(end) for end in ends])
        tail = " | ".join(self._literal(str(end)) for end in ends)
        return f"{head}{self.lower(content)} ({tail})"

    def _text_until(self, ends: Sequence[str]) -> str:
        """Free text and one of the ends. Of an end with added tokens, text before the first one is free text too."""
        alternatives = []
        for end in ends:
            pieces = split(end, self._added_tokens)
            ids = [index for index, (_, token_id) in enumerate(pieces) if token_id is not None]
            if ids:
                rest = "".join(piece for piece, _ in pieces[ids[0] :])
                alternatives.append(f"TEXT {self._literal(rest)}")
            elif not end:
                raise GrammarError("structural_tag: the end of a tag with any_text must not be empty")
            else:
                alternatives.append(self._add_rule("[lazy]", f"/(?s:.*)/ {quote(end)}"))
        return f"({' | '.join(alternatives)})"

    def _triggered_tags(self, form: Format) -> str:
        triggers, tags = strings(form, "triggers"), objects(form, "tags")
        for tag in tags:
            if sum(string(tag, "begin").startswith(trigger) for trigger in triggers) != 1:
                raise GrammarError("structural_tag: each tag must begin with exactly one of the triggers")
        bodies = [(trigger, self.bodies(tags, trigger)) for trigger in triggers]
        direct = " | ".join(f"{self._literal(trigger)} {body}" for trigger, body in bodies)
        after_text = " | ".join(f"{self._text_until([trigger])} {body}" for trigger, body in bodies)
        if form.get("stop_after_first"):
            return direct if form.get("at_least_one") else f"{after_text} | TEXT"
        return f"({direct}) ({after_text})* TEXT" if form.get("at_least_one") else f"({after_text})* TEXT"

    def _tags_with_separator(self, form: Format) -> str:
        tags = " | ".join(f"({self._tag(tag)})" for tag in objects(form, "tags"))
        separator = string(form, "separator")
        more = "" if form.get("stop_after_first") else f" ({self._literal(separator)} ({tags}))*"
        return f"({tags}){more}" if form.get("at_least_one") else f"(({tags}){more})?"
