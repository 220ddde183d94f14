"""The forms of `/v1/audio/transcriptions` and `/v1/audio/translations`, and their responses."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from proa_gateway.http.forms import Form
from proa_gateway.serving.fields import Count, Name, Penalty, Probability, RequestFields, Seed, Text
from proa_gateway.serving.ignored_fields import Refused

_SPEAKERS = Refused("speakers are not told apart")
_BEAMS = Refused("the text is sampled once")
REFUSED_IN_AUDIO: Mapping[str, Refused] = {
    "chunking_strategy[type]": Refused("long audio is always cut at quiet places", neutral=("auto",)),
    "hotwords": Refused("use prompt"),
    "keywords": Refused("use prompt"),
    "known_speaker_names": _SPEAKERS,
    "known_speaker_references": _SPEAKERS,
    "languages": Refused("use language"),
    "length_penalty": _BEAMS,
    "n": _BEAMS,
    "to_language": Refused("translations are in English", neutral=("en",)),
    "use_beam_search": _BEAMS,
}
LISTS = ("include", "timestamp_granularities")  # fields that may be there several times


class TranscriptionRequest(RequestFields):
    """The fields of the form beside its file."""

    language: Name | None = Field(None, description="Of the audio, such as `en`. Default: found by the model.")
    prompt: Text | None = Field(None, description="Text as if it had been said before the audio.")
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] | None = None
    timestamp_granularities: list[Literal["segment", "word"]] = Field(
        default_factory=list, description="Of `verbose_json`. Default: `segment`."
    )
    stream: bool | None = None
    include: list[Literal["logprobs"]] = Field(default_factory=list)
    chunking_strategy: Literal["auto"] | None = Field(None, description="Long audio is always cut at quiet places.")
    temperature: Annotated[float, Field(ge=0, le=2)] | None = Field(
        None,
        description="Default: 0. With 0, unlikely text is sampled again at higher ones, but not in streams.",
    )

    # vLLM's extra fields
    max_completion_tokens: Count | None = Field(None, description="Of each 30 seconds of audio.")
    seed: Seed | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=2**31)] | None = None
    min_p: Probability | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=1000)] | None = None

    @property
    def extra_fields(self) -> dict[str, Any]:
        """The fields that this class does not have."""
        return self.__pydantic_extra__

    @property
    def wants_logprobs(self) -> bool:
        return "logprobs" in self.include

    @property
    def wants_words(self) -> bool:
        return "word" in self.timestamp_granularities

    @property
    def has_timestamps(self) -> bool:
        return self.response_format in ("srt", "verbose_json", "vtt")


def fields_of(form: Form) -> dict[str, Any]:
    """The form's fields as a JSON body would have them. Of a field that may be there once, the last one counts."""
    return {name: values if name in LISTS else values[-1] for name, values in form.fields.items()}


class TranscriptionToken(BaseModel):
    token: str
    logprob: float
    bytes: list[int]


class DurationUsage(BaseModel):
    type: Literal["duration"]
    seconds: int  # of the audio, rounded up


class Transcription(BaseModel):
    """A response that is not streamed."""

    text: str
    usage: DurationUsage
    logprobs: list[TranscriptionToken] | None = None


class TranscriptionSegment(BaseModel):
    id: int
    seek: int  # start of its window, in 10 ms
    start: float  # seconds
    end: float
    text: str
    tokens: list[int]
    temperature: float
    avg_logprob: float  # this and the following are those of its window
    compression_ratio: float
    no_speech_prob: float


class TranscriptionWord(BaseModel):
    word: str  # with the punctuation at it
    start: float  # seconds
    end: float


class VerboseTranscription(BaseModel):
    """With the `response_format` `verbose_json`."""

    task: Literal["transcribe", "translate"]
    language: str  # its English name
    duration: float  # seconds
    text: str
    segments: list[TranscriptionSegment] | None = None  # absent if only words are asked for
    words: list[TranscriptionWord] | None = None
    usage: DurationUsage


class TextDeltaEvent(BaseModel):
    type: Literal["transcript.text.delta"]
    delta: str
    logprobs: list[TranscriptionToken] | None = None


class InputTokenDetails(BaseModel):
    audio_tokens: int
    text_tokens: int


class TokenUsage(BaseModel):
    type: Literal["tokens"]
    input_tokens: int
    output_tokens: int
    total_tokens: int
    input_token_details: InputTokenDetails


class TextDoneEvent(BaseModel):
    type: Literal["transcript.text.done"]
    text: str
    usage: TokenUsage
    logprobs: list[TranscriptionToken] | None = None
