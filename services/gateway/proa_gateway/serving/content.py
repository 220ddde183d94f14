"""A message's content: texts, images and audio, as requests send them and as chat templates read them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Final, Literal

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from proa.chat_template import ChatTemplate
from proa.template_rules import PARTS, TEXT, ContentForms, text_of, text_part
from proa_gateway.serving.fields import check_text, check_texts

MAX_PARTS: Final = 4096  # of a message
_STRING = {"type": "string"}
_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["text"]}, "text": _STRING},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "description": "A data URL with the image in base64, or an http(s) URL that the gateway may fetch.",
    "properties": {
        "type": {"enum": ["image_url"]},
        "image_url": {
            "anyOf": [
                {
                    "type": "object",
                    "properties": {"url": _STRING, "detail": {"enum": ["auto", "low", "high", "original"]}},
                    "required": ["url"],
                },
                _STRING,
            ]
        },
    },
    "required": ["type", "image_url"],
}
_AUDIO_PART = {
    "type": "object",
    "description": "OpenAI's form: a file in base64. What the file is decides, not its `format`.",
    "properties": {
        "type": {"enum": ["input_audio"]},
        "input_audio": {
            "type": "object",
            "properties": {"data": _STRING, "format": _STRING},
            "required": ["data"],
        },
    },
    "required": ["type", "input_audio"],
}
_AUDIO_URL_PART = {
    "type": "object",
    "description": "vLLM's form: a data URL with the file in base64, or an http(s) URL that the gateway may fetch.",
    "properties": {
        "type": {"enum": ["audio_url"]},
        "audio_url": {
            "anyOf": [{"type": "object", "properties": {"url": _STRING}, "required": ["url"]}, _STRING],
        },
    },
    "required": ["type", "audio_url"],
}
_REFUSAL_PART = {
    "type": "object",
    "description": "In messages of the assistant; read as a text.",
    "properties": {"type": {"enum": ["refusal"]}, "refusal": _STRING},
    "required": ["type", "refusal"],
}
_THINKING_PART = {
    "type": "object",
    "description": "In messages of the assistant; read as `reasoning_content`.",
    "properties": {
        "type": {"enum": ["thinking"]},
        "thinking": {"anyOf": [_STRING, {"type": "array", "items": _TEXT_PART}]},
    },
    "required": ["type", "thinking"],
}
_PARTS = {
    "type": "array",
    "maxItems": MAX_PARTS,
    "items": {"anyOf": [_TEXT_PART, _IMAGE_PART, _AUDIO_PART, _AUDIO_URL_PART, _REFUSAL_PART, _THINKING_PART]},
}
_FORMAT_FORMS = {"string": TEXT, "openai": PARTS}


@dataclass(frozen=True, slots=True)
class ImagePart:
    """`url`: a data URL, or one to fetch. `param`: the field that errors name; empty: the part's own place."""

    url: str = field(repr=False)
    param: str = ""


@dataclass(frozen=True, slots=True)
class AudioPart:
    """`url`: a data URL, or one to fetch. `param`: the field that errors name; empty: the part's own place."""

    url: str = field(repr=False)
    param: str = ""


def read_answer(parts: Sequence[object]) -> tuple[list[object], str]:
    """Return an assistant's content with its refusals as texts, and its reasoning, from parts of the type `thinking`.
    Parts that are neither stay as they are."""
    content: list[object] = []
    thoughts: list[str] = []
    for part in parts:
        match part:
            case {"type": "refusal", "refusal": str(text)}:
                content.append({"type": "text", "text": text})
            case {"type": "thinking", "thinking": str(text)}:
                thoughts.append(text)
            case {"type": "thinking", "thinking": [*blocks]}:  # Mistral's form
                thoughts += [block["text"] for block in blocks if _is_text(block)]
            case _:
                content.append(part)
    return content, "\n".join(thoughts)


def _is_text(part: object) -> bool:
    return isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)


TextPart = dict[str, Any]
"""It has `text`; its other fields are for chat templates."""
Part = TextPart | ImagePart | AudioPart


def joined(parts: Iterable[str | ImagePart]) -> str | list[Part]:
    """The content of texts and images: text if there are no images. Neighbouring texts are joined with newlines."""
    content: list[Part] = []
    texts: list[str] = []
    for part in parts:
        if isinstance(part, str):
            texts.append(part)
        else:
            content += [*_text(texts), part]
            texts.clear()
    content += _text(texts)
    return content if any(isinstance(part, ImagePart) for part in content) else text_of(for_template(content))


def _text(texts: Sequence[str]) -> Sequence[TextPart]:
    return text_part("\n".join(texts)) if texts else ()


def together(first: str | list[Part], second: str | list[Part]) -> str | list[Part]:
    """Two contents as one."""
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n{second}"
    return [part for each in (first, second) for part in (text_part(each) if isinstance(each, str) else each)]


def image_url(value: object) -> str:
    """Raises `PydanticCustomError` unless it is the text of a URL."""
    if not isinstance(value, str) or not value:
        raise PydanticCustomError("invalid_type", "has an image without the text of a URL")
    return _long_text(value)


def _long_text(value: str) -> str:
    return value if value.isascii() else check_text(value)  # data URLs are megabytes


def _content(value: object) -> str | list[Part] | None:
    if value is None:
        return None
    if isinstance(value, str):
        return check_text(value)
    if not isinstance(value, list):
        raise PydanticCustomError("invalid_type", "must be a string or a list of content parts")
    if len(value) > MAX_PARTS:
        raise PydanticCustomError("invalid_value", "must not have more than {limit} parts", {"limit": MAX_PARTS})
    return [_part(part) for part in value]


def _part(part: object) -> Part:
    if isinstance(part, ImagePart | AudioPart):
        return part
    kind = part.get("type") if isinstance(part, dict) else None
    if not isinstance(part, dict) or not isinstance(kind, str):
        raise PydanticCustomError("invalid_type", "must have content parts that are objects with a type")
    if kind == "image_url":
        return _image_part(part)
    if kind in ("input_audio", "audio_url"):
        return _audio_part(part)
    if kind != "text":
        message = (
            "has a part of type {kind}: only text, image_url, input_audio and audio_url are supported, and refusal and "
            "thinking in messages of the assistant"
        )
        raise PydanticCustomError("unsupported_parameter", message, {"kind": repr(kind[:40])})
    if not isinstance(part.get("text"), str):
        raise PydanticCustomError("invalid_type", "has a text part without text")
    check_texts(part)
    return part


def _image_part(part: dict[str, Any]) -> ImagePart:
    """`image_url` is OpenAI's object with a `url`, or the URL itself, as in vLLM. OpenAI's `detail` and vLLM's `uuid`
    have no effect: images have the model's resolution, and are known by their pixels."""
    value = part.get("image_url")
    url = value.get("url") if isinstance(value, dict) else value
    if url is None and part.get("uuid") is not None:
        message = "has an image with a uuid and no URL: images are not found by uuid"
        raise PydanticCustomError("unsupported_parameter", message)
    return ImagePart(image_url(url))


def _audio_part(part: dict[str, Any]) -> AudioPart:
    """`input_audio` is OpenAI's object with `data`, `audio_url` an object with a `url`, or the URL itself."""
    match part:
        case {"type": "input_audio", "input_audio": {"data": str(data)}} if data:
            return AudioPart(f"data:;base64,{_long_text(data)}")
        case {"type": "audio_url", "audio_url": str(url) | {"url": str(url)}} if url:
            return AudioPart(_long_text(url))
    raise PydanticCustomError("invalid_type", "has an audio without its data in base64, or the text of a URL")


Content = Annotated[
    str | list[Part] | None,
    PlainValidator(_content),
    WithJsonSchema({"anyOf": [_STRING, _PARTS, {"type": "null"}]}),
]
"""A message's text, or its parts."""

_PLACES: Final[Mapping[type, dict[str, Any]]] = {
    ImagePart: {"type": "image"},
    AudioPart: {"type": "audio", "audio": ""},
}

ContentFormat = Literal["auto", "string", "openai"]
"""vLLM's names: what the template reads, always text, or always parts."""


def forms_of(template: ChatTemplate, content_format: ContentFormat) -> Mapping[str, ContentForms]:
    """Return the forms of content that the template reads, by role."""
    return (
        template.content_forms
        if content_format == "auto"
        else dict.fromkeys(("user", "system", "assistant", "tool"), _FORMAT_FORMS[content_format])
    )


def for_template(content: str | list[Part] | None) -> str | list[dict[str, Any]] | None:
    """The content with a part of the type `image` for each image and `audio` for each audio, as chat templates read
    them. Qwen2-Audio's looks for an audio by the key of that name."""
    if isinstance(content, list):
        return [part if isinstance(part, dict) else dict(_PLACES[type(part)]) for part in content]
    return content
