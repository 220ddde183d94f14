"""Images of offline prompts, as vLLM's `LLM` takes them: `multi_modal_data` of a prompt, and parts of chat messages."""

import base64
import binascii
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

from proa.contract import Image, ImageInput
from proa.image.limits import ImageLimits

_OTHER_MEDIA = ("image", "image_embeds", "input_image", "input_audio", "audio_url", "video", "video_url")


def images_of(prompt: Mapping[str, Any]) -> list[object]:
    """The images of a prompt's `multi_modal_data`. Raises `ValueError` for other data than images."""
    data = prompt.get("multi_modal_data") or {}
    for name in ("mm_processor_kwargs", "multi_modal_uuids"):
        if prompt.get(name):
            raise ValueError(f"{name} is not supported")
    if others := sorted(data.keys() - {"image"}):
        raise ValueError(f"multi_modal_data can have images only, got {', '.join(others)}")
    found = data.get("image")
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


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


def expand_token_ids(token_ids: Sequence[int], num_tokens: Sequence[int], image_token_id: int) -> list[int]:
    """`token_ids` with each image's token as often as it has tokens, if it is there once for each image; else as they
    are."""
    if token_ids.count(image_token_id) != len(num_tokens):
        return list(token_ids)
    counts = iter(num_tokens)
    repeated = ([each] * (next(counts) if each == image_token_id else 1) for each in token_ids)
    return list(chain.from_iterable(repeated))


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
