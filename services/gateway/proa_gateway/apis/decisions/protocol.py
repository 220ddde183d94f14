"""The body of `POST /v1/decisions`, in OpenAI's form, and its response."""

import json
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, Field, StrictBool, StrictStr, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.apis.decisions.contents import (
    IN_OUTPUTS,
    IN_ROLE,
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Asked,
    Parts,
    StrictModel,
    check_kinds,
    contents,
    option_text,
)
from proa_gateway.pooling.fields import PoolingFields
from proa_gateway.serving.content import ImagePart
from proa_gateway.serving.conversation import MAX_MESSAGES
from proa_gateway.serving.fields import Name, Text, check_texts, known_types
from proa_gateway.serving.ignored_fields import Refused

REFUSED: Mapping[str, Refused] = {
    "stream": Refused("there is one response"),
    "messages": Refused("use input"),
    "state": Refused("use input, or /v1/systemone"),
    "tools": Refused("nothing is called; earlier calls and their outputs are items of input"),
    "instructions": Refused("write a system message into input"),
}


class DecisionMessage(BaseModel):
    """`phase`: of an assistant's message, has no effect."""

    type: Literal["message"]
    role: Literal["user", "assistant", "system", "developer"]
    content: Parts
    phase: Literal["commentary", "final_answer"] | None = None

    @model_validator(mode="after")
    def _check_parts(self) -> "DecisionMessage":
        check_kinds(self.content, IN_ROLE[self.role], f"a message with the role {self.role}")
        return self


class DecisionFunctionCall(BaseModel):
    """A call by the model. `namespace`: of the function. `arguments`: JSON text."""

    type: Literal["function_call"]
    call_id: Text
    name: Text
    arguments: Text
    namespace: Text | None = None


class DecisionCustomCall(BaseModel):
    """A call of a custom tool by the model. `input`: any text."""

    type: Literal["custom_tool_call"]
    call_id: Text
    name: Text
    input: Text
    namespace: Text | None = None


class DecisionCallOutput(BaseModel):
    type: Literal["function_call_output", "custom_tool_call_output"]
    call_id: Text
    output: Parts

    @model_validator(mode="after")
    def _check_parts(self) -> "DecisionCallOutput":
        check_kinds(self.output, IN_OUTPUTS, "an output")
        return self


def _with_type(value: object) -> object:
    """Messages may have no type."""
    return {"type": "message", **value} if isinstance(value, dict) and "role" in value else value


DecisionItem = DecisionMessage | DecisionFunctionCall | DecisionCustomCall | DecisionCallOutput
_Item = Annotated[
    Annotated[DecisionItem, Field(discriminator="type")],
    known_types("message", "function_call", "function_call_output", "custom_tool_call", "custom_tool_call_output"),
    BeforeValidator(_with_type),
]


def _as_items(value: object) -> object:
    if not isinstance(value, (str, list)):
        raise PydanticCustomError("invalid_value", "must be a string or a list of items")
    return [{"type": "message", "role": "user", "content": value}] if isinstance(value, str) else value


def _check_calls(items: list[DecisionItem]) -> list[DecisionItem]:
    """Raises `PydanticCustomError` for an output without a call before it."""
    called: set[str] = set()
    for index, item in enumerate(items):
        if isinstance(item, DecisionCallOutput) and item.call_id not in called:
            message = "has at {index} an output with the call_id {id}, which no call before it has"
            raise PydanticCustomError("invalid_value", message, {"index": index, "id": repr(item.call_id[:40])})
        if isinstance(item, (DecisionFunctionCall, DecisionCustomCall)):
            called.add(item.call_id)
    return items


def _check_instructions(parts: Parts) -> Parts:
    check_kinds(parts, IN_ROLE["user"], "instructions")
    return parts


class _DecisionQuestion(StrictModel):
    instructions: Annotated[Parts, AfterValidator(_check_instructions)]
    name: Text | None = None

    def _content(self, path: str) -> list[str | ImagePart]:
        return list(contents(self.instructions, f"{path}.instructions"))


class PredicateQuestion(_DecisionQuestion):
    """How likely it is that a statement about the input is true, or that the answer to a question is yes."""

    type: Literal["predicate"]

    def asked(self, path: str) -> Asked:
        return Asked(path, self._content(path), ["yes", "no"], in_both_orders=True)


class ChoiceOption(StrictModel):
    value: Annotated[StrictStr | StrictBool, AfterValidator(check_texts)]
    description: Text | None = None


def _check_choices(choices: list[ChoiceOption]) -> list[ChoiceOption]:
    if len({(type(choice.value), choice.value) for choice in choices}) < len(choices):
        raise PydanticCustomError("invalid_value", "must have different values")
    return choices


class ChoiceQuestion(_DecisionQuestion):
    """Which option fits the input. A string and a boolean of the same text are different values."""

    type: Literal["choice"]
    choices: Annotated[
        list[ChoiceOption],
        Field(min_length=2, max_length=MAX_OPTIONS, fail_fast=True),
        AfterValidator(_check_choices),
    ]

    def asked(self, path: str) -> Asked:
        # Beside booleans, strings are written as JSON too, which tells "true" from true.
        has_booleans = any(isinstance(choice.value, bool) for choice in self.choices)
        names = [
            json.dumps(each.value, ensure_ascii=False) if has_booleans else str(each.value) for each in self.choices
        ]
        options = [option_text(name, choice.description) for name, choice in zip(names, self.choices, strict=True)]
        return Asked(path, self._content(path), options)


class ScoreLevel(StrictModel):
    label: Text
    description: Text | None = None


class ScoreQuestion(_DecisionQuestion):
    """Which level the input has. `levels`: in order, the lowest first."""

    type: Literal["score"]
    levels: Annotated[list[ScoreLevel], Field(min_length=2, max_length=MAX_OPTIONS, fail_fast=True)]

    def asked(self, path: str) -> Asked:
        options = [option_text(level.label, level.description) for level in self.levels]
        return Asked(path, self._content(path), options)


DecisionQuestion = PredicateQuestion | ChoiceQuestion | ScoreQuestion
_Question = Annotated[
    Annotated[DecisionQuestion, Field(discriminator="type")], known_types("predicate", "choice", "score")
]


class DecisionRequest(PoolingFields):
    """`POST /v1/decisions`. Answers have the order of the questions."""

    input: Annotated[
        list[_Item],
        Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True),
        AfterValidator(_check_calls),
        BeforeValidator(_as_items, json_schema_input_type=str | list[_Item]),
    ]
    questions: Annotated[list[_Question], Field(min_length=1, max_length=MAX_QUESTIONS, fail_fast=True)]
    prompt_cache_key: Name | None = Field(None, description="Like `session_id`, which comes first.")


# Of responses, for the OpenAPI document. They are written without these classes.


class PredicateAnswer(BaseModel):
    """`probability`: of yes, the mean of both orders of the options."""

    type: Literal["predicate"]
    name: str | None  # the question's, like that of other answers
    probability: float


class ChoiceProbability(BaseModel):
    value: str | bool
    probability: float


class ChoiceAnswer(BaseModel):
    """`confidence`: the probability of the choice, times that of any option in the model's whole vocabulary."""

    type: Literal["choice"]
    name: str | None
    choice: str | bool
    confidence: float
    probabilities: list[ChoiceProbability]


class LevelProbability(BaseModel):
    value: int  # the level's number, from 0
    label: str
    probability: float


class ScoreAnswer(BaseModel):
    """`score`: the mean of the levels' numbers, from 0, weighted by their probabilities."""

    type: Literal["score"]
    name: str | None
    score: float
    confidence: float  # as of a choice, of the likeliest level
    probabilities: list[LevelProbability]


class RefusalAnswer(BaseModel):
    """The model would write something else than an option."""

    type: Literal["refusal"]
    name: str | None


class InputTokensDetails(BaseModel):
    cached_tokens: int
    cache_write_tokens: Literal[0]


class OutputTokensDetails(BaseModel):
    reasoning_tokens: Literal[0]


class DecisionUsage(BaseModel):
    """The input counts once, however many questions there are."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: Literal[0]
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class Decision(BaseModel):
    answers: list[PredicateAnswer | ChoiceAnswer | ScoreAnswer | RefusalAnswer]  # in the order of the questions
    model: str
    usage: DecisionUsage
