"""The bodies of `/generate`."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from proa_gateway.serving.fields import ModelName, Name, NumTokens, RequestId, Seed
from proa_gateway.serving.generation_request import SamplingParameters
from proa_gateway.serving.ignored_fields import REFUSED as REFUSED_BY_ALL
from proa_gateway.serving.ignored_fields import Refused
from proa_gateway.serving.structured_outputs import GrammarFields

MAX_NEW_TOKENS = 128  # SGLang's default
_TEXT_ONLY = Refused("prompts are text or token ids")

REFUSED = {
    **{name: REFUSED_BY_ALL[name] for name in ("input_embeds", "lora_id", "custom_logit_processor")},
    **{name: REFUSED_BY_ALL[name] for name in ("session_params", "return_hidden_states", "return_routed_experts")},
    **{name: REFUSED_BY_ALL[name] for name in ("extra_key", "bootstrap_host", "bootstrap_port", "bootstrap_room")},
    **dict.fromkeys(("video_data", "audio_data", "modalities"), _TEXT_ONLY),
    "image_data": Refused("use /v1/chat/completions"),
    "token_ids_logprob": Refused("log probabilities are those of the likeliest tokens; use top_logprobs_num"),
    "return_prompt_token_ids": Refused("use /tokenize"),
    "return_entropy": Refused("the entropy is not computed"),
    "return_sampling_mask": Refused("the sampled tokens' sets are not recorded"),
    "return_flat_raw_top_logprobs": Refused("log probabilities have one form"),
    "max_thinking_tokens": Refused("the tokens of reasoning are not counted yet"),
    "sampling_params.stop_regex": REFUSED_BY_ALL["stop_regex"],
    "sampling_params.custom_params": REFUSED_BY_ALL["custom_params"],
    "sampling_params.max_tokens": Refused("use max_new_tokens"),
    "sampling_params.min_tokens": Refused("use min_new_tokens"),
}
_IDS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_STRINGS = {"type": "array", "items": {"type": "string"}, "minItems": 1}
_EVENTS = "Events, each with the whole output so far, or an error; the last one is `[DONE]`."


def _text(value: object) -> object:
    texts: list[Any] = value if isinstance(value, list) else [value]
    if not texts or not all(isinstance(text, str) for text in texts):
        raise PydanticCustomError("invalid_type", "must be a string or a list of strings")
    try:
        "".join(texts).encode()
    except UnicodeEncodeError:
        raise PydanticCustomError("invalid_value", "must be valid Unicode: it has a lone surrogate") from None
    return value


def _input_ids(value: object) -> object:
    for ids in value if isinstance(value, list) and value and isinstance(value[0], list) else [value]:
        if not isinstance(ids, list) or not ids or not all(type(each) is int for each in ids):
            raise PydanticCustomError("invalid_type", "must be a list of token ids, or a list of such lists")
    return value


TextField = Annotated[str | list[str], PlainValidator(_text), WithJsonSchema({"anyOf": [{"type": "string"}, _STRINGS]})]
InputIds = Annotated[
    list[int] | list[list[int]],
    PlainValidator(_input_ids),
    WithJsonSchema({"anyOf": [_IDS, {"type": "array", "items": _IDS, "minItems": 1}]}),
]


class SamplingFields(SamplingParameters, GrammarFields):
    """SGLang's `sampling_params`. None: the model's default."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False)
    __pydantic_extra__: dict[str, Any]

    max_new_tokens: NumTokens | None = Field(
        MAX_NEW_TOKENS, description="Null: up to the end of the context. 0: only the prompt is scored."
    )
    min_new_tokens: NumTokens | None = None
    sampling_seed: Seed | None = None
    spaces_between_special_tokens: bool | None = Field(None, description="No effect: no spaces are added.")
    no_stop_trim: bool | None = None


class GenerateBody(BaseModel):
    """`POST /generate`. Either `text` or `input_ids` has the prompts; a list of texts or of lists of ids is a batch."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, protected_namespaces=())
    __pydantic_extra__: dict[str, Any]

    text: TextField | None = None
    input_ids: InputIds | None = None
    sampling_params: SamplingFields = Field(default_factory=lambda: SamplingFields.model_validate({}))
    stream: bool = False
    return_logprob: bool = False
    logprob_start_len: Annotated[int, Field(ge=-1, lt=2**31)] = Field(
        -1,
        description="Position in the prompt from which log probabilities are returned. -1: those of the output only.",
    )
    top_logprobs_num: Annotated[int, Field(ge=0, lt=2**31)] = 0
    return_text_in_logprobs: bool = False
    rid: RequestId | Annotated[list[RequestId], Field(max_length=1024, fail_fast=True)] | None = Field(
        None, description="One for all prompts, or one for each."
    )
    model: ModelName | None = Field(None, description="May be omitted if only one model is served.")
    lora_path: ModelName | None = Field(None, description="Name of an adapter; as in `model`.")
    priority: Annotated[int, Field(gt=-(2**31), lt=2**31)] | None = Field(None, description="Larger is served first.")
    cache_salt: Annotated[str, Field(max_length=256)] | None = None
    session_id: Name | None = None

    @model_validator(mode="after")
    def _check(self) -> "GenerateBody":
        if (self.text is None) == (self.input_ids is None):
            raise PydanticCustomError("invalid_value", "needs either text or input_ids")
        if isinstance(self.rid, list) and len(self.rid) != len(self.prompts):
            raise PydanticCustomError("invalid_value", "rid must have an id for each prompt")
        return self

    @property
    def is_batch(self) -> bool:
        return isinstance(self.text, list) or (self.input_ids is not None and isinstance(self.input_ids[0], list))

    @property
    def prompts(self) -> list[Any]:
        """Texts, or lists of token ids."""
        given: Any = self.text if self.text is not None else self.input_ids
        return given if self.is_batch else [given]

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that these classes do not have, by their path in the body."""
        sampling = {f"sampling_params.{name}": value for name, value in self.sampling_params.__pydantic_extra__.items()}
        return {**self.__pydantic_extra__, **sampling}


Entry = tuple[float | None, int, str | None]  # log probability, token id, text


class FinishReason(BaseModel):
    """`length`: of the output, in tokens. `matched`: the stop string or token."""

    type: Literal["stop", "length", "abort"]
    length: int | None = None
    matched: int | str | None = None


class MetaInfo(BaseModel):
    """`finish_reason`: null in an event that is not the last one. `e2e_latency`: seconds."""

    id: str
    finish_reason: FinishReason | None
    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    e2e_latency: float | None = None
    input_token_logprobs: list[Entry] | None = None  # if `return_logprob` is true, like `output_token_logprobs`
    output_token_logprobs: list[Entry] | None = None
    input_top_logprobs: list[list[Entry] | None] | None = None  # if `top_logprobs_num` is set too, like the next
    output_top_logprobs: list[list[Entry]] | None = None


class Generated(BaseModel):
    """`index`: in an event, of the choice in a batch."""

    text: str
    output_ids: list[int]
    meta_info: MetaInfo
    index: int | None = None


GENERATE_RESPONSE: dict[str, Any] = {
    "model": Generated | list[Generated],
    "description": "The output; of a batch, or with n over 1, a list.",
    "content": {"text/event-stream": {"schema": {"type": "string", "description": _EVENTS}}},
}
