"""Structured outputs: the constraint of a request's fields, as the grammar of its sampling parameters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from proa.contract import Grammar, SamplingParams, StructuredOutputsParams
from proa.grammar import GrammarError
from proa_gateway.engines.model_registry import ServedModel
from proa_gateway.engines.pool import EnginePool
from proa_gateway.errors import InvalidRequest, UnsupportedField
from proa_gateway.parsing.grammar import Reasoning, reasoning_grammar
from proa_gateway.serving.constraint_fields import ConstraintFields, ResponseFormat, StructuredOutputs
from proa_gateway.serving.grammars import Grammars
from proa_gateway.serving.message_constraint import BUDGET, NO_BUDGET, MessageConstraint, MessageGrammarKey

# Fields at the top of a request, and those of `StructuredOutputsParams` that they stand for.
_TOP_LEVEL = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
    "structural_tag": "structural_tag",
}


@dataclass(frozen=True, slots=True)
class Constraint:
    """What the output must match."""

    param: str  # the request's field, for errors
    params: StructuredOutputsParams
    strict: bool = False  # refuse a JSON schema that can be enforced only in part


def constraint_of(request: ConstraintFields) -> Constraint | None:
    """Raises `InvalidRequest` if several fields constrain the output."""
    given = _given(request)
    if len(given) > 1:
        message = f"Only one field may constrain the output, the request has {' and '.join(given)}."
        raise InvalidRequest(message, param=list(given)[1])
    options = request.structured_outputs
    whitespace = options.whitespace_pattern if options is not None else None
    for param, form in given.items():
        try:
            params = StructuredOutputsParams(
                whitespace_pattern=whitespace or request.guided_whitespace_pattern or None,
                disable_any_whitespace=bool(options and options.disable_any_whitespace),
                disable_additional_properties=options is None or options.disable_additional_properties is not False,
                **form,
            )
        except ValueError as error:
            raise InvalidRequest(f"{param}: {error}.", param=param) from None
        return Constraint(param, params, strict=_is_strict(request.response_format))
    return None


def _given(request: ConstraintFields) -> dict[str, dict[str, Any]]:
    """The constraints by their fields, each as an argument of `StructuredOutputsParams`."""
    given: dict[str, dict[str, Any]] = {}
    if request.response_format is not None and request.response_format.type != "text":
        given[request.format_field] = _of_response_format(request.response_format)
    if request.structured_outputs is not None:
        given |= {f"structured_outputs.{name}": {name: value} for name, value in _forms(request.structured_outputs)}
    for field, name in _TOP_LEVEL.items():
        if value := getattr(request, field):
            given[field] = {name: tuple(value) if name == "choice" else value}
    return given


def _of_response_format(response_format: ResponseFormat) -> dict[str, Any]:
    if response_format.json_schema is not None and response_format.type == "json_schema":
        return {"json": response_format.json_schema.schema_}
    if response_format.type == "structural_tag":
        return {"structural_tag": response_format.structural_tag}
    return {"json_object": True}


def _forms(options: StructuredOutputs) -> list[tuple[str, Any]]:
    forms = {
        "json": options.json_,
        "regex": options.regex,
        "choice": None if options.choice is None else tuple(options.choice),
        "grammar": options.grammar,
        "json_object": options.json_object or None,
        "structural_tag": options.structural_tag,
    }
    return [(name, value) for name, value in forms.items() if value is not None]


def _is_strict(response_format: ResponseFormat | None) -> bool:
    return bool(response_format and response_format.json_schema and response_format.json_schema.strict)


class Constrainer:
    def __init__(self, grammars: Grammars, pool: EnginePool) -> None:
        self._grammars = grammars
        self._pool = pool

    async def constrain(
        self,
        params: Sequence[SamplingParams],
        constraint: Constraint | None,
        message: MessageConstraint | None,
        model: ServedModel,
    ) -> tuple[str, ...]:
        """Set the grammar of `params`. Return warnings about what it does not enforce.

        `constraint`: of the content. `message`: of the calls; None: all output is content. Raises `UnsupportedField` if
        the model's engines support no grammars, `InvalidRequest` for a constraint that cannot be enforced.
        """
        if constraint is None and (message is None or not message.constrains):
            return ()
        param = constraint.param if constraint is not None else message.param if message is not None else None
        if self._pool.refuses_grammars(model.base_name):
            text = f"{param} is not supported by the engines of the model {model.base_name!r}."
            raise UnsupportedField(text, param=param)
        if message is not None and message.thinking_token_budget is not None:
            if constraint is not None or message.constrains_calls:
                raise InvalidRequest(f"{BUDGET} and {param} exclude each other.", param=BUDGET)
            self._bound_reasoning(params, message, model, message.thinking_token_budget)
            return ()
        grammar: Grammar | None = None
        warnings: tuple[str, ...] = ()
        try:
            if constraint is not None:
                lowered = await self._grammars.lower(constraint.params, model.tokenizer, strict=constraint.strict)
                grammar, warnings = lowered.grammar, lowered.warnings
            if message is not None:
                key = MessageGrammarKey.of(message, grammar, model.tokenizer)
                grammar = (await self._grammars.get(key)).grammar
        except GrammarError as error:
            raise InvalidRequest(f"{param}: {error}.", param=param) from None
        for each in params:
            each.grammar = grammar
        return tuple(f"{param}: {warning}" for warning in warnings)

    def _bound_reasoning(
        self, params: Sequence[SamplingParams], message: MessageConstraint, model: ServedModel, max_tokens: int
    ) -> None:
        if message.reasoning is Reasoning.CLOSED and message.tool_format.reasoning is not None:
            return
        added_tokens = model.tokenizer.added_tokens
        grammar = reasoning_grammar(message.tool_format, max_tokens, message.reasoning, added_tokens)
        if grammar is None:
            raise UnsupportedField(NO_BUDGET, param=BUDGET)
        for each in params:
            each.grammar = grammar
