"""Where images and audios stand in a prompt: in its text, then among its tokens. Without Pillow."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TypeVar

from proa.contract import Audio, AudioInput, Image, ImageInput, token_ids_of

T = TypeVar("T", Image, Audio)


def _text_of(media: Image | Audio, input: ImageInput | AudioInput) -> str:
    """The text of the tokens that an image or an audio has in a prompt."""
    if isinstance(media, Image) and isinstance(input, ImageInput) and input.row_end:
        return input.row_end.join([input.token * (media.width // input.unit)] * (media.height // input.unit))
    return input.token * media.num_tokens


def expand_placeholders(text: str, media: Sequence[Image | Audio], input: ImageInput | AudioInput) -> str:
    """The prompt with each placeholder replaced by the tokens of its image or audio. Raises `ValueError` unless there
    is one placeholder for each."""
    first, *others = text.split(input.placeholder)
    if len(others) != len(media):
        raise ValueError(
            f"the prompt has {len(others)} times {input.placeholder!r}, which stands for an {_name(input)}, "
            f"but {len(media)} {_name(input)}s"
        )
    expanded = [
        input.prefix + _text_of(each, input) + input.suffix + other for each, other in zip(media, others, strict=True)
    ]
    return first + "".join(expanded)


def expand_token_ids(
    token_ids: Sequence[int], media: Sequence[Image | Audio], input: ImageInput | AudioInput
) -> list[int]:
    """`token_ids` with the tokens of each image, or of each audio, in place of its token, if this is there once for
    each; else as they are."""
    if token_ids.count(input.token_id) != len(media):
        return list(token_ids)
    remaining = iter(media)
    expanded = (token_ids_of(next(remaining), input) if each == input.token_id else [each] for each in token_ids)
    return list(chain.from_iterable(expanded))


def place_media(token_ids: Sequence[int], media: Sequence[T], input: ImageInput | AudioInput) -> tuple[T, ...]:
    """The images, or the audios, with their offsets in the prompt, in order. Raises `ValueError` if `token_id` stands
    at other places than theirs."""
    placed: list[T] = []
    end = 0
    for each in media:
        offset = _find(token_ids, input.token_id, end)
        if offset is None or list(token_ids[offset : offset + each.num_tokens]) != token_ids_of(each, input):
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
