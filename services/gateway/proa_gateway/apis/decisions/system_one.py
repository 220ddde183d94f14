"""The body of `POST /v1/systemone`, in TypeSafe's form, and its response."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.apis.decisions.contents import (
    MAX_OPTIONS,
    MAX_QUESTIONS,
    Asked,
    StrictModel,
    TextOrJson,
    option_text,
    written,
)
from proa_gateway.pooling.fields import PoolingFields
from proa_gateway.serving.content import MAX_PARTS, ImagePart, image_url
from proa_gateway.serving.fields import Text, known_types
from proa_gateway.serving.ignored_fields import Refused

_NO_MEDIA = Refused("inputs are texts and images")
REFUSED_IN_SYSTEM_ONE: Mapping[str, Refused] = {
    "stream": Refused("there is one response"),
    "input": Refused("use state, or /v1/decisions"),
    "assets": Refused("use images"),
    "audio": _NO_MEDIA,
    "videos": _NO_MEDIA,
    "joint": Refused("each question is answered by itself"),
    "temperature": Refused("probabilities are the model's own", neutral=(1, 1.0)),
}
_URL_SCHEMA: dict[str, Any] = {"type": "object", "properties": {"url": {"type": "string"}}, "required": ["url"]}


def _image(value: object) -> str:
    """A URL, `{"url": …}`, or a chat's part of the type `image_url`. Raises `PydanticCustomError`."""
    if isinstance(value, dict) and "image_url" in value:
        value = value["image_url"]
    return image_url(value.get("url") if isinstance(value, dict) else value)


_Images = Annotated[
    list[Annotated[str, PlainValidator(_image), WithJsonSchema({"anyOf": [{"type": "string"}, _URL_SCHEMA]})]],
    Field(max_length=MAX_PARTS, fail_fast=True),
]


def _at_most(limit: int) -> BeforeValidator:
    """Limit an object's entries before pydantic validates them all."""

    def check(value: object) -> object:
        if isinstance(value, dict) and len(value) > limit:
            raise PydanticCustomError("invalid_value", "must not have more than {limit} entries", {"limit": limit})
        return value

    return BeforeValidator(check)


class _SystemOneQuestion(StrictModel):
    instructions: TextOrJson | None = None
    images: _Images | None = None

    def _content(self, path: str) -> list[str | ImagePart]:
        texts = [] if self.instructions is None else [written(self.instructions)]
        return [*texts, *images_of(self.images, f"{path}.images")]


def images_of(images: Sequence[str] | None, path: str) -> Iterator[ImagePart]:
    for index, url in enumerate(images or ()):
        yield ImagePart(url, f"{path}[{index}]")


class NoulCriteria(StrictModel):
    """What counts as yes, and what as no."""

    true: TextOrJson | None = None
    false: TextOrJson | None = None


class NoulQuestion(_SystemOneQuestion):
    """A question for yes or no, or a statement that may be true."""

    type: Literal["noul"]
    criteria: NoulCriteria | None = None

    @model_validator(mode="after")
    def _check_asked(self) -> "NoulQuestion":
        criteria = self.criteria or NoulCriteria()
        if not (self.instructions or criteria.true or criteria.false or self.images):
            raise PydanticCustomError("invalid_value", "must have instructions, or criteria")
        return self

    def asked(self, path: str) -> Asked:
        criteria = self.criteria or NoulCriteria()
        described = (("yes", criteria.true), ("no", criteria.false))
        options = [option_text(name, text and written(text)) for name, text in described]
        return Asked(path, self._content(path), options, in_both_orders=True)


class CriteriaChoice(_SystemOneQuestion):
    """`criteria`: the options by their names, each with a description or null."""

    type: Literal["choice"]
    criteria: Annotated[dict[Text, TextOrJson | None], Field(min_length=1), _at_most(MAX_OPTIONS)]

    def asked(self, path: str) -> Asked:
        options = [option_text(name, text and written(text)) for name, text in self.criteria.items()]
        return Asked(path, self._content(path), options)


class CriteriaScore(_SystemOneQuestion):
    """`criteria`: descriptions of the levels in order, the lowest first."""

    type: Literal["score"]
    criteria: Annotated[list[TextOrJson], Field(min_length=1, max_length=MAX_OPTIONS, fail_fast=True)]

    def asked(self, path: str) -> Asked:
        return Asked(path, self._content(path), [written(level) for level in self.criteria])


SystemOneQuestion = NoulQuestion | CriteriaChoice | CriteriaScore


class SystemOneRequest(PoolingFields):
    """`POST /v1/systemone`, TypeSafe's. Answers have the ids of the questions."""

    state: TextOrJson
    questions: Annotated[
        dict[
            Text,
            Annotated[
                Annotated[SystemOneQuestion, Field(discriminator="type")], known_types("noul", "choice", "score")
            ],
        ],
        Field(min_length=1),
        _at_most(MAX_QUESTIONS),
    ]
    images: _Images | None = Field(None, description="Behind the state: URLs, or objects with a `url`.")


# Of responses, for the OpenAPI document. They are written without these classes.


class NoulAnswer(BaseModel):
    """`noul`: the probability of yes, the mean of both orders of the options."""

    type: Literal["noul"]
    noul: float


class CriteriaChoiceAnswer(BaseModel):
    type: Literal["choice"]
    choice: str
    confidence: float
    probabilities: dict[str, float]


class CriteriaScoreAnswer(BaseModel):
    """`legend`: the criteria by the numbers of the levels, from 0."""

    type: Literal["score"]
    score: float
    confidence: float
    legend: dict[str, Any]
    probabilities: dict[str, float]


class SystemOneRefusal(BaseModel):
    """The model would write something else than an option."""

    type: Literal["refusal"]


class SystemOneUsage(BaseModel):
    input_tokens: int
    output_tokens: Literal[0]


class SystemOneResponse(BaseModel):
    model: str
    answers: dict[str, NoulAnswer | CriteriaChoiceAnswer | CriteriaScoreAnswer | SystemOneRefusal]
    usage: SystemOneUsage
