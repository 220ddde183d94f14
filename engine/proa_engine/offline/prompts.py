"""What the offline `LLM` takes: prompts, and adapters."""

import reprlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeGuard

from proa.contract import Image, ImageInput
from proa.image.placeholders import expand_placeholders, place_images
from proa_engine.offline.images import chat_images, expand_token_ids, images_of, prepare
from proa_engine.tokenizer import Tokenizer


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


Prompt = str | Sequence[int] | Mapping[str, Any]
Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """`text` is None if the prompt was given as token ids."""

    text: str | None
    token_ids: list[int]
    images: tuple[Image, ...] = ()


class PromptTokenizer:
    """Tokenizes prompts for one model."""

    def __init__(self, tokenizer: Tokenizer | None, image_input: ImageInput | None, max_images: int | None) -> None:
        """`image_input`: None for a model that reads no images. `max_images`: of a prompt; None: any number."""
        self._tokenizer = tokenizer
        self._image_input = image_input
        self._max_images = max_images

    def tokenize(self, prompt: Prompt) -> TokenizedPrompt:
        """Raises `ValueError` for an object that is no prompt, and for images that the model cannot read."""
        content = prompt.get("prompt_token_ids", prompt.get("prompt")) if isinstance(prompt, Mapping) else prompt
        images = images_of(prompt) if isinstance(prompt, Mapping) else []
        if isinstance(content, str):
            return self._tokenize_text(content, images)
        if not are_token_ids(content):
            given = reprlib.repr(prompt)
            raise ValueError(f"a prompt must be text, token ids, or have prompt or prompt_token_ids, got {given}")
        if not images:
            return TokenizedPrompt(None, list(content))
        model = self._required_input(images)
        prepared = prepare(images, model)
        token_ids = expand_token_ids(content, [image.num_tokens for image in prepared], model.token_id)
        return TokenizedPrompt(None, token_ids, place_images(token_ids, prepared, model))

    def tokenize_chat(self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] | None) -> TokenizedPrompt:
        """The prompt for the assistant's next message. `tools`: in the form of the OpenAI API.

        Raises `ValueError` if the model has no tokenizer, no chat template, one without tools where tools are given, or
        if it cannot read the images of the messages.
        """
        if self._tokenizer is None:
            raise ValueError("chat needs a tokenizer")
        messages, images = chat_images(messages)
        return self._tokenize_text(self._tokenizer.render_chat(messages, tools), images, add_special_tokens=False)

    def _tokenize_text(
        self, text: str, images: Sequence[object], *, add_special_tokens: bool = True
    ) -> TokenizedPrompt:
        if self._tokenizer is None:
            raise ValueError("a prompt of text needs a tokenizer; give prompt_token_ids instead")
        if not images:
            return TokenizedPrompt(text, self._tokenizer.encode(text, add_special_tokens=add_special_tokens))
        model = self._required_input(images)
        prepared = prepare(images, model)
        expanded = expand_placeholders(text, [image.num_tokens for image in prepared], model)
        token_ids = self._tokenizer.encode(expanded, add_special_tokens=add_special_tokens)
        return TokenizedPrompt(text, token_ids, place_images(token_ids, prepared, model))

    def _required_input(self, images: Sequence[object]) -> ImageInput:
        """How the model reads `images`."""
        if self._image_input is None:
            raise ValueError("the model reads no images")
        if self._max_images is not None and len(images) > self._max_images:
            raise ValueError(f"a prompt has {len(images)} images, limit_mm_per_prompt allows {self._max_images}")
        return self._image_input


def are_token_ids(prompt: object) -> TypeGuard[Sequence[int]]:
    return isinstance(prompt, list | tuple) and all(isinstance(token_id, int) for token_id in prompt)
