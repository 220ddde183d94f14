"""What the offline `LLM` takes: prompts, with images as vLLM's `LLM` takes them, and adapters.

Images are `multi_modal_data` of a prompt, and parts of chat messages.
"""

import base64
import binascii
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from proa.contract import Audio, AudioInput, EmbeddingType, Image, ImageInput, PromptEmbeds
from proa.image.limits import ImageLimits
from proa.image.placeholders import expand_placeholders, expand_token_ids, place_media
from proa_engine.offline.audio import audios_of, prepare_audios
from proa_engine.tokenizer import ChatOptions, Tokenizer

_OTHER_MEDIA = ("image", "image_embeds", "input_image", "input_audio", "audio_url", "video", "video_url")

Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


def media_of(prompt: Mapping[str, Any]) -> tuple[list[object], list[object]]:
    """The images and the audios of a prompt's `multi_modal_data`. Raises `ValueError` for other data."""
    data = prompt.get("multi_modal_data") or {}
    for name in ("mm_processor_kwargs", "multi_modal_uuids"):
        if prompt.get(name):
            raise ValueError(f"{name} is not supported")
    if others := sorted(data.keys() - {"image", "audio"}):
        raise ValueError(f"multi_modal_data can have images and audio only, got {', '.join(others)}")
    found = data.get("image") or []
    return list(found) if isinstance(found, list | tuple) else [found], audios_of(data)


def chat_images(messages: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[object]]:
    """The messages with `{"type": "image"}` for their images, as chat templates read them, and the images: Pillow's, or
    the texts of URLs.

    Raises `ValueError` for a part with other media.
    """
    images: list[object] = []
    plain: list[Mapping[str, Any]] = []
    for message in messages:
        content = message.get("content")
        if isinstance(content, list | tuple):
            message = {**message, "content": [_plain_part(part, images) for part in content]}
        plain.append(message)
    return plain, images


def prepare(images: Sequence[object], image_input: ImageInput) -> list[Image]:
    """Resize images of Pillow, and those of data URLs.

    Raises `ValueError` for another object, for an image that cannot be read, and without Pillow.
    """
    try:
        from proa.image.prepare import prepare_image, prepare_pillow
    except ImportError as error:
        raise ValueError("images need Pillow: pip install 'proa-engine[images]'") from error
    return [
        prepare_image(_data_of(image), image_input, ImageLimits())
        if isinstance(image, str)
        else prepare_pillow(image, image_input)
        for image in images
    ]


def _plain_part(part: Any, images: list[object]) -> Any:
    """The part without its image, which is appended to `images`."""
    if not isinstance(part, Mapping):
        return part
    if part.get("image_pil") is not None:
        images.append(part["image_pil"])
    elif "image_url" in part:
        url = part["image_url"]
        images.append(url.get("url") if isinstance(url, Mapping) else url)
    elif (kind := part.get("type")) in _OTHER_MEDIA:
        raise ValueError(f"a part of a message can be text, image_url or image_pil, got {kind}")
    else:
        return part
    return {"type": "image"}


def _data_of(url: str) -> bytes:
    head, _, data = url.partition(",")
    if not head.startswith("data:"):
        raise ValueError(f"image_url: only data URLs can be read offline, got {url[:40]!r}; give an image_pil")
    if not head.endswith(";base64"):
        raise ValueError("image_url: a data URL must be base64")
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"image_url: not base64: {error}") from error


@dataclass(frozen=True, slots=True)
class LoRARequest:
    """`lora_int_id` is not used: adapters are identified by their names. Raises `ValueError` for an empty name."""

    lora_name: str
    lora_int_id: int
    lora_path: str  # folder with adapter_config.json and adapter_model.safetensors

    def __post_init__(self) -> None:
        if not self.lora_name or not self.lora_path:
            raise ValueError(f"a LoRARequest needs a name and a path, got {self}")


def paths_by_name(requests: Iterable[LoRARequest]) -> dict[str, str]:
    """Raises `ValueError` if two have one name and different paths."""
    paths: dict[str, str] = {}
    for request in requests:
        if paths.setdefault(request.lora_name, request.lora_path) != request.lora_path:
            raise ValueError(f"two adapters have the name {request.lora_name!r}")
    return paths


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`text` is None if the prompt was given as token ids."""

    text: str | None
    token_ids: list[int]
    images: tuple[Image, ...] = ()
    audios: tuple[Audio, ...] = ()
    embeds: tuple[PromptEmbeds, ...] = ()

    @property
    def text_token_ids(self) -> list[int]:
        """The tokens that an output's text continues: none if some of them are embeddings."""
        return [] if self.embeds else self.token_ids


class PromptTokenizer:
    """Tokenizes prompts for one model."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        image_input: ImageInput | None,
        max_images: int | None,
        audio_input: AudioInput | None = None,
    ) -> None:
        """`image_input`, `audio_input`: None for a model that reads none. `max_images`: of a prompt; None: any
        number."""
        self._tokenizer = tokenizer
        self._image_input = image_input
        self._max_images = max_images
        self._audio_input = audio_input

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Raises `ValueError` for an object that is no prompt, and for images that the model cannot read."""
        if isinstance(prompt, Mapping) and prompt.get("prompt_embeds") is not None:
            return _embedded(prompt)
        content = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        images, audios = media_of(prompt) if isinstance(prompt, Mapping) else ([], [])
        if audios:
            if images:
                raise ValueError("a prompt can have images or audios, got both")
            return self._with_audios(prompt, content, audios)
        if isinstance(content, str):
            return self._tokenize_text(content, images)
        if not are_token_ids(content):
            given = reprlib.repr(prompt)
            raise ValueError(f"a prompt must be text, token ids, or have prompt or prompt_token_ids, got {given}")
        if not images:
            return TokenizedPrompt(None, list(content))
        model = self._required_input(images)
        prepared = prepare(images, model)
        token_ids = expand_token_ids(content, prepared, model)
        return TokenizedPrompt(None, token_ids, place_media(token_ids, prepared, model))

    def _with_audios(self, prompt: Prompt, content: object, audios: Sequence[object]) -> TokenizedPrompt:
        """Text for a model whose tokens all read one audio has the special tokens that the model begins with, and no
        others are added. Other prompts have a placeholder for each audio."""
        if not self._audio_input:
            raise ValueError("the model reads no audio")
        model, prepared = self._audio_input, prepare_audios(audios, self._audio_input)
        if are_token_ids(content):
            token_ids = list(content) if model.cross_attention else expand_token_ids(content, prepared, model)
            text = None
        elif isinstance(content, str):
            expanded = text = content
            if not model.cross_attention:
                expanded = expand_placeholders(content, prepared, model)
            token_ids = self._tokenize_text(expanded, [], add_special_tokens=not model.cross_attention).token_ids
        else:
            raise ValueError(f"a prompt must have prompt or prompt_token_ids, got {reprlib.repr(prompt)}")
        if not model.cross_attention:
            prepared = place_media(token_ids, prepared, model)
        return TokenizedPrompt(text, token_ids, audios=prepared)

    def tokenize_chat(self, messages: Sequence[Message], options: ChatOptions) -> TokenizedPrompt:
        """The prompt of a conversation. Raises `ValueError` if the model has no tokenizer, as `Tokenizer.render_chat`,
        or if the model cannot read the images of the messages."""
        if self._tokenizer is None:
            raise ValueError("chat needs a tokenizer")
        messages, images = chat_images(messages)
        return self._tokenize_text(self._tokenizer.render_chat(messages, options), images, add_special_tokens=False)

    def _tokenize_text(
        self, text: str, images: Sequence[object], *, add_special_tokens: bool = True
    ) -> TokenizedPrompt:
        if self._tokenizer is None:
            raise ValueError("a prompt of text needs a tokenizer; give prompt_token_ids instead")
        if not images:
            return TokenizedPrompt(text, self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        model = self._required_input(images)
        prepared = prepare(images, model)
        expanded = expand_placeholders(text, prepared, model)
        token_ids = self._tokenizer.encode(expanded, add_special_tokens=add_special_tokens)
        return TokenizedPrompt(text, token_ids, place_media(token_ids, prepared, model))

    def _required_input(self, images: Sequence[object]) -> ImageInput:
        """How the model reads `images`."""
        if self._image_input is None:
            raise ValueError("the model reads no images")
        if self._max_images is not None and len(images) > self._max_images:
            raise ValueError(f"a prompt has {len(images)} images, limit_mm_per_prompt allows {self._max_images}")
        return self._image_input


def _embedded(prompt: Mapping[str, Any]) -> TokenizedPrompt:
    """The prompt of a mapping with `prompt_embeds`, whose `prompt`, if any, is only its text. Raises `ValueError` for
    what is no tensor [tokens, hidden_size], or [1, tokens, hidden_size], of a type that requests can have."""
    if others := sorted(prompt.keys() & {"prompt_token_ids", "multi_modal_data"}):
        raise ValueError(f"a prompt with prompt_embeds cannot have {others[0]}")
    import torch  # on use: it must not be before the number of its threads is set

    tensor, types = prompt["prompt_embeds"], {getattr(torch, each.name.lower()): each for each in EmbeddingType}
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in types or tensor.layout is not torch.strided:
        raise ValueError("prompt_embeds must be a dense tensor of float32, float16 or bfloat16")
    if tensor.dim() == 3 and len(tensor) == 1:
        tensor = tensor[0]
    if tensor.dim() != 2 or not tensor.numel():
        raise ValueError(f"prompt_embeds must have the shape [tokens, hidden_size], got {list(tensor.shape)}")
    values = tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()
    embeds = PromptEmbeds(num_tokens=len(tensor), type=types[tensor.dtype], values=values)
    return TokenizedPrompt(prompt.get("prompt"), [0] * len(tensor), embeds=(embeds,))


def are_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    return isinstance(prompt, list | tuple) and all(isinstance(token_id, int) for token_id in prompt)


def prompts_of(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt or several, as a list."""
    if not isinstance(prompts, Iterable):
        return [prompts]  # refused as any other object that is no prompt
    if isinstance(prompts, (str, Mapping)) or (prompts and are_token_ids(prompts)):
        return [prompts]
    return list(prompts)  # type: ignore[arg-type]
