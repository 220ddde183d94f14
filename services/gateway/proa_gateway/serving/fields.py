"""Types of request fields that need more than plain annotations: a string or a list of them, unsupported fields, …

Unions are resolved by hand: pydantic would report an error for each of their branches.
"""

from collections.abc import Sequence
from dataclasses import fields
from typing import Annotated, Any, Final, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from proa.contract import RepetitionDetectionParams
from proa_gateway.http.middleware import REQUEST_ID

_STRING = {"type": "string"}
MAX_PROMPTS: Final = 16_384  # gateways have lower limits of their own
_ENVELOPE: Final = 8  # levels of a stored response, or of an event, around a field that it repeats
NO_UNICODE: Final = "must be valid Unicode: it has a lone surrogate"
_PROMPTS: Final = ("input", "queries", "text_1", "text_2")
"""Fields that may be null and are no settings."""
_TOKEN_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}


NEUTRAL: Final[tuple[object, ...]] = (None, False, [], {}, "")
"""Values that leave any field as if it had not been sent."""

_REPETITION_FIELDS = {field.name for field in fields(RepetitionDetectionParams)}


def is_one_of(value: object, others: Sequence[object]) -> bool:
    """Compares types too: 0 is not False."""
    return any(value == other and type(value) is type(other) for other in others)


def _check_neutral(value: object) -> object:
    if not is_one_of(value, NEUTRAL):
        raise PydanticCustomError("unsupported_parameter", "is not supported")
    return value


Unsupported = Annotated[Any, AfterValidator(_check_neutral), Field(description="Not supported.")]
"""A field that is rejected with any value that would change the output."""


def check_text(value: str) -> str:
    """Raises `PydanticCustomError` for what tokenizers do not accept."""
    try:
        value.encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_value", NO_UNICODE) from None
    return value


def check_texts(value: object) -> object:
    """`check_text` for all strings in a JSON value. Not recursive: clients may nest deeply."""
    rest = [value]
    while rest:
        entry = rest.pop()
        if isinstance(entry, str):
            check_text(entry)
        elif isinstance(entry, dict):
            rest += entry.keys()
            rest += entry.values()
        elif isinstance(entry, list):
            rest += entry
    return value


def check_json(value: object) -> object:
    """Raises `PydanticCustomError` for a value that `orjson` cannot write within other values."""
    nested = value
    for _ in range(_ENVELOPE):
        nested = [nested]
    try:
        orjson.dumps(nested)
    except orjson.JSONEncodeError as error:
        reasons = {"surrogate": NO_UNICODE, "64-bit": "has an integer of more than 64 bits"}
        reason = next((text for part, text in reasons.items() if part in str(error)), "is nested too deeply")
        raise PydanticCustomError("invalid_value", reason) from None
    return value


def at_most(limit: int) -> BeforeValidator:
    """Limit a string's characters before pydantic counts them, which takes time in proportion to the length."""

    def check(value: object) -> object:
        if isinstance(value, str) and len(value) > limit:
            raise PydanticCustomError("invalid_value", "must not have more than {limit} characters", {"limit": limit})
        return value

    return BeforeValidator(check)


Text = Annotated[str, AfterValidator(check_text)]
"""A string that tokenizers accept: without the lone surrogates that JSON's escapes allow."""
TemplateValue = Annotated[Any, AfterValidator(check_texts)]
"""A JSON value that a chat template may write into the prompt."""


def _variables(value: dict[str, Any]) -> dict[str, Any]:
    for name in ("messages", "add_generation_prompt", "continue_final_message", "chat_template"):
        if name in value:
            message = "must not have {name}: the request has a field for it"
            raise PydanticCustomError("invalid_value", message, {"name": name})
    return value


TemplateVariables = Annotated[dict[Text, TemplateValue], AfterValidator(_variables)]
"""The chat template's variables, by name."""


def _as_list(value: object) -> object:
    if not isinstance(value, (str, list)):
        raise PydanticCustomError("invalid_value", "must be a string or a list of strings")
    return [value] if isinstance(value, str) else value


def _no_empty_string(value: list[str]) -> list[str]:
    if not all(value):
        raise PydanticCustomError("invalid_value", "must not contain an empty string")
    return value


Strings = Annotated[
    list[Text],
    Field(max_length=64, fail_fast=True),
    BeforeValidator(_as_list),
    AfterValidator(_no_empty_string),
    WithJsonSchema({"anyOf": [_STRING | {"minLength": 1}, {"type": "array", "items": _STRING | {"minLength": 1}}]}),
]
"""A non-empty string, or a list of them."""


def _prompts(value: object) -> list[str | list[int]]:
    if isinstance(value, list) and value and not isinstance(value[0], int):
        if len(value) > MAX_PROMPTS:
            raise PydanticCustomError("invalid_value", "must not have more than {limit}", {"limit": MAX_PROMPTS})
        return [_prompt(entry) for entry in value]
    return [_prompt(value)]


def _prompt(value: object) -> str | list[int]:
    if isinstance(value, str):
        return check_text(value)
    if isinstance(value, list) and set(map(type, value)) == {int}:
        return value
    raise PydanticCustomError("invalid_type", "must be a string, a list of strings or lists of token ids")


Prompts = Annotated[
    list[str | list[int]],
    PlainValidator(_prompts),
    WithJsonSchema(
        {
            "anyOf": [
                _STRING,
                {"type": "array", "items": _STRING, "minItems": 1},
                _TOKEN_IDS,
                {"type": "array", "items": _TOKEN_IDS, "minItems": 1},
            ]
        }
    ),
]
"""One or more prompts, each a string or token ids."""


def known_types(*types: str) -> BeforeValidator:
    """One error for a list entry of a wrong type, instead of one for each type that it could have."""

    def check(value: object) -> object:
        kind = value.get("type") if isinstance(value, dict) else None
        if not isinstance(kind, str):
            raise PydanticCustomError("invalid_type", "must be an object with a type")
        if kind not in types:
            message = "has the type {kind}: only {types} are supported"
            raise PydanticCustomError(
                "unsupported_parameter", message, {"kind": repr(kind[:40]), "types": ", ".join(types)}
            )
        return value

    return BeforeValidator(check)


def _biases(value: dict[str, float]) -> dict[int, float]:
    biases: dict[int, float] = {}
    if wrong := [key for key in value if not (key.isascii() and key.isdigit() and len(key) <= 10)]:
        keys = ", ".join(repr(key[:40]) for key in wrong[:10])
        raise PydanticCustomError("invalid_value", "must have token ids as keys, not {keys}", {"keys": keys})
    for key, bias in value.items():
        if not -100 <= bias <= 100:
            raise PydanticCustomError("invalid_value", "must have values from -100 to 100")
        biases[int(key)] = bias
    return biases


def _numbers(value: object) -> object:
    """One error, instead of one for each value."""
    if isinstance(value, dict) and not set(map(type, value.values())) <= {int, float}:
        raise PydanticCustomError("invalid_value", "must have numbers as values")
    return value


LogitBias = Annotated[dict[str, float], BeforeValidator(_numbers), AfterValidator(_biases)]
"""Token id -> what is added to its logit. JSON's keys are strings; the validated value's are integers."""


def _known_repetition_fields(value: object) -> object:
    """Pydantic sets fields that it does not know on the object, which cannot have them."""
    if isinstance(value, dict) and (unknown := value.keys() - _REPETITION_FIELDS):
        raise PydanticCustomError("invalid_value", "has no field {name}", {"name": repr(min(map(str, unknown)))[:40]})
    return value


RepetitionDetection = Annotated[RepetitionDetectionParams, BeforeValidator(_known_repetition_fields)]

Probability = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]
Count = Annotated[int, Field(ge=1, lt=2**31)]
NumTokens = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=-(2**63), lt=2**64)]
NumLogprobs = Annotated[int, Field(ge=-1, lt=2**31, description="-1: the whole vocabulary.")]
Name = Annotated[str, Field(max_length=256), at_most(256)]
ModelName = Annotated[Text, Field(max_length=1024), at_most(1024)]
RequestId = Annotated[str, Field(pattern=f"^{REQUEST_ID}$"), at_most(128)]
Effort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
TokenIds = Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=327_680, fail_fast=True)]
"""At most those of a large vocabulary."""


class RequestFields(BaseModel):
    """The fields of all requests that engines work for, with OpenAI's and vLLM's names."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[str, Any]

    model: ModelName | None = Field(None, description="May be omitted if only one model is served.")
    user: Name | None = Field(None, description="Routed as one session, unless another field names one.")
    request_id: RequestId | None = Field(None, description="Used in the response's id. The header comes first.")
    priority: Annotated[int, Field(ge=-(2**31), lt=2**31)] | None = None  # smaller first, within a key
    cache_salt: Name | None = None  # requests share cached blocks only with those of the same salt
    session_id: Name | None = Field(None, description="Requests of a session prefer the engine of its last one.")

    @model_validator(mode="before")
    @classmethod
    def _leave_out_empty_texts(cls, values: Any) -> Any:
        """Clients send `""` for settings that their user left empty: it stands for null, in fields that may be null. In
        a prompt it is an empty text."""
        if not isinstance(values, dict) or "" not in values.values():
            return values
        return {name: value for name, value in values.items() if value != "" or not cls._may_be_null(name)}

    @classmethod
    def _may_be_null(cls, name: str) -> bool:
        field = cls.model_fields.get(name)
        return field is not None and field.default is None and name not in _PROMPTS
