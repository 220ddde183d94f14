"""JsonRules: the rules of one tool's arguments, with JSON values in them."""

from proa.grammar.findings import Findings
from proa.grammar.json_schema import JsonOptions, json_schema
from proa.grammar.lark import AddedTokens
from proa_gateway.parsing.lark_rules import LarkRules
from proa_gateway.parsing.schema_types import Schema


class JsonRules(LarkRules):
    """`strict`: raise `GrammarError` for what of a schema cannot be held exactly."""

    def __init__(self, added_tokens: AddedTokens, prefix: str, *, strict: bool) -> None:
        super().__init__(added_tokens, prefix)
        self.strict = strict
        self._findings = Findings()

    def json(self, schema: Schema) -> str:
        return self.rule(json_schema(schema, JsonOptions(strict=self.strict), self._findings))
