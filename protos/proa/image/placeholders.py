"""Where images and audios stand in a prompt: in its text, then among its tokens. Without Pillow."""

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from proa.contract import Audio, AudioInput, Image, ImageInput

T = TypeVar("T", Image, Audio)


def expand_placeholders(text: str, num_tokens: Sequence[int], input: ImageInput | AudioInput) -> str:
    """The prompt with each placeholder replaced by the tokens of its image or audio. Raises `ValueError` unless there
    is one placeholder for each."""
    first, *others = text.split(input.placeholder)
    if len(others) != len(num_tokens):
        raise ValueError(
            f"the prompt has {len(others)} times {input.placeholder!r}, which stands for an {_name(input)}, "
            f"but {len(num_tokens)} {_name(input)}s"
        )
    expanded = [
        input.prefix + input.token * count + input.suffix + other
        for count, other in zip(num_tokens, others, strict=True)
    ]
    return first + "".join(expanded)


def place_media(token_ids: Sequence[int], media: Sequence[T], input: ImageInput | AudioInput) -> tuple[T, ...]:
    """The images, or the audios, with their offsets in the prompt, in order. Raises `ValueError` if `token_id` stands
    at other places than theirs."""
    placed: list[T] = []
    end = 0
    for each in media:
        offset = _find(token_ids, input.token_id, end)
        if offset is None or not _is_run(token_ids, offset, each.num_tokens, input.token_id):
            raise ValueError(f"the prompt has fewer {input.token!r} than its {_name(input)}s have tokens")
        end = offset + each.num_tokens
        placed.append(replace(each, offset=offset))
    if _find(token_ids, input.token_id, end) is not None:
        raise ValueError(f"the prompt has {input.token!r} outside of its {_name(input)}s")
    return tuple(placed)


def _name(input: ImageInput | AudioInput) -> str:
    return "audio" if isinstance(input, AudioInput) else "image"


def _find(token_ids: Sequence[int], token_id: int, start: int) -> int | None:
    try:
        return token_ids.index(token_id, start)
    except ValueError:
        return None


def _is_run(token_ids: Sequence[int], offset: int, num_tokens: int, token_id: int) -> bool:
    return token_ids[offset : offset + num_tokens].count(token_id) == num_tokens
