"""Chats with images between texts, their greedy tokens by `transformers`, and the requests that they are."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from PIL import Image

from proa.contract import EngineCoreRequest, ImageInput, SamplingParams
from proa.image.placeholders import place_media
from proa.image.prepare import prepare_pillow
from support.engine import Engine, request, run
from support.greedy import Expected
from support.image_models import chat_tokens, greedy_chat

NUM_TOKENS = 8
PARAMS = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)


@dataclass(frozen=True, eq=False)
class Chat:
    parts: tuple[str | Image.Image, ...]

    @property
    def images(self) -> list[Image.Image]:
        return [part for part in self.parts if not isinstance(part, str)]

    @property
    def messages(self) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": part} if isinstance(part, str) else {"type": "image"} for part in self.parts]
        return [{"role": "user", "content": parts}]


@cache
def picture(seed: int, height: int, width: int) -> Image.Image:
    return Image.frombytes("RGB", (width, height), random.Random(seed).randbytes(height * width * 3))


WIDE, TALL, LARGE = picture(1, 40, 90), picture(2, 100, 33), picture(3, 128, 128)
ALIKE = Chat((LARGE, "and", TALL, " are they alike?"))
# Without images, with one, with several, with the same one twice, and twice the same chat.
CHATS = (
    Chat(("plain",)),
    Chat(("a text without any image",)),
    Chat(("What is this? ", WIDE)),
    Chat(("Compare ", WIDE, " and again ", WIDE, ".")),
    ALIKE,
    ALIKE,
)


@dataclass(frozen=True)
class Case:
    """A model's chats: their prompts and what follows them."""

    folder: Path
    prompts: list[list[int]]
    expected: list[Expected]

    def request(self, index: int, image_input: ImageInput, name: str = "") -> EngineCoreRequest:
        images = [prepare_pillow(image, image_input) for image in CHATS[index].images]
        prompt = self.prompts[index]
        return replace(request(name or str(index), prompt, PARAMS), images=place_media(prompt, images, image_input))

    def generate(self, engine: Engine) -> list[list[int]]:
        """The tokens of all chats, in one batch."""
        results = run(engine, [self.request(index, image_input_of(engine)) for index in range(len(CHATS))])
        return [results[str(index)].token_ids for index in range(len(CHATS))]

    def check(self, token_ids: Sequence[Sequence[int]]) -> None:
        """`token_ids` of each chat, as far as they are sure."""
        for index, (ours, theirs) in enumerate(zip(token_ids, self.expected, strict=True)):
            assert list(ours[: theirs.num_sure]) == theirs.token_ids[: theirs.num_sure], f"chat {index}"


def image_input_of(engine: Engine) -> ImageInput:
    images = engine.executor.started.model_config.images
    assert images is not None
    return images.input


def make_case(folder: Path) -> Case:
    prompts = [chat_tokens(folder, chat.messages, chat.images) for chat in CHATS]
    by_chat = {chat: greedy_chat(folder, chat.messages, chat.images, NUM_TOKENS) for chat in dict.fromkeys(CHATS)}
    expected = [by_chat[chat] for chat in CHATS]
    num_sure = sum(each.num_sure for each in expected)
    assert num_sure > 0.9 * NUM_TOKENS * len(CHATS)
    return Case(folder, prompts, expected)
