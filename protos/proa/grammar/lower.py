"""lower: a client's constraint as the grammar that is sent to the engine."""

from dataclasses import dataclass

from proa.contract.grammar import Grammar, StructuredOutputsParams
from proa.grammar.check import GrammarError
from proa.grammar.client_grammar import client_grammar
from proa.grammar.json_schema import JsonOptions, json_schema
from proa.grammar.lark import AddedTokens, choice, regex
from proa.grammar.schema_bounds import Findings
from proa.grammar.structural_tag import structural_tag


@dataclass(frozen=True, slots=True)
class Lowered:
    grammar: Grammar
    warnings: tuple[str, ...] = ()  # what the grammar does not enforce, for the client


def lower(params: StructuredOutputsParams, added_tokens: AddedTokens, *, strict: bool = False) -> Lowered:
    """Raises `GrammarError` for a constraint that cannot be held; `check` finds the rest.

    `added_tokens`: those of the model's tokenizer. `strict`: refuse a JSON schema that can be held only in part.
    """
    options = JsonOptions(
        strict=strict,
        whitespace=params.whitespace_pattern,
        spaces=not params.disable_any_whitespace,
        closed=params.disable_additional_properties,
    )
    findings = Findings()
    try:
        grammar = _lower(params, added_tokens, options, findings)
    except GrammarError:
        raise
    except ValueError as error:  # of Grammar
        raise GrammarError(str(error)) from None
    return Lowered(grammar, tuple(findings.warnings))


def _lower(
    params: StructuredOutputsParams, added_tokens: AddedTokens, options: JsonOptions, findings: Findings
) -> Grammar:
    if params.json is not None:
        return Grammar(text=f"start: {json_schema(params.json, options, findings)}\n")
    if params.regex is not None:
        return Grammar(text=f"start: {regex(params.regex)}\n")
    if params.choice is not None:
        return Grammar(text=choice(params.choice))
    if params.grammar is not None:
        return Grammar(text=client_grammar(params.grammar, added_tokens, options, findings))
    if params.structural_tag is not None:
        return structural_tag(params.structural_tag, added_tokens, options, findings)
    return Grammar(text=f"start: {json_schema({'type': 'object'}, options, findings)}\n")
