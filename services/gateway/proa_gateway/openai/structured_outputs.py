"""Structured outputs: the constraint that the fields of a request have."""

from dataclasses import dataclass
from typing import Any

from proa.contract import StructuredOutputsParams
from proa_gateway.errors import InvalidRequest
from proa_gateway.openai.constraint_fields import ConstraintFields, ResponseFormat, StructuredOutputs

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
