"""Where images stand in a prompt: in its text, then among its tokens. Without Pillow."""

from collections.abc import Sequence
from dataclasses import replace

from proa.contract import Image, ImageInput


def expand_placeholders(text: str, num_tokens: Sequence[int], input: ImageInput) -> str:
    """The prompt with each placeholder replaced by the tokens of its image. Raises `ValueError` unless there is one
    placeholder for each image."""
    first, *others = text.split(input.placeholder)
    if len(others) != len(num_tokens):
        raise ValueError(
            f"the prompt has {len(others)} times {input.placeholder!r}, which stands for an image, "
            f"but {len(num_tokens)} images"
        )
    expanded = [
        input.prefix + input.token * count + input.suffix + other
        for count, other in zip(num_tokens, others, strict=True)
    ]
    return first + "".join(expanded)


def place_images(token_ids: Sequence[int], images: Sequence[Image], input: ImageInput) -> tuple[Image, ...]:
    """The images with their offsets in the prompt, in order. Raises `ValueError` if `token_id` stands at other places
    than those of the images."""
    placed = []
    end = 0
    for image in images:
        offset = _find(token_ids, input.token_id, end)
        if offset is None or not _is_run(token_ids, offset, image.num_tokens, input.token_id):
            raise ValueError(f"the prompt has fewer {input.token!r} than its images have tokens")
        end = offset + image.num_tokens
        placed.append(replace(image, offset=offset))
    if _find(token_ids, input.token_id, end) is not None:
        raise ValueError(f"the prompt has {input.token!r} outside of its images")
    return tuple(placed)


def _find(token_ids: Sequence[int], token_id: int, start: int) -> int | None:
    try:
        return token_ids.index(token_id, start)
    except ValueError:
        return None


def _is_run(token_ids: Sequence[int], offset: int, num_tokens: int, token_id: int) -> bool:
    return token_ids[offset : offset + num_tokens].count(token_id) == num_tokens
