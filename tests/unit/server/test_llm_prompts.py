"""Offline prompts with images: where the images are, and which are refused."""

import base64
import json
from io import BytesIO
from typing import Any

import pytest
from PIL import Image
from tokenizers import AddedToken

from proa.contract import ImageInput
from proa_engine.offline.prompts import PromptTokenizer
from proa_engine.tokenizer import ChatOptions, Tokenizer
from support.tokenizers import byte_level_tokenizer

TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}<image>{% else %}{{ part.text }}"
    "{% endif %}{% endfor %}{% endif %};{% endfor %}"
)
RED = Image.new("RGB", (64, 32), "red")  # 2 tokens
BLUE = Image.new("RGB", (96, 64), "blue")  # 6 tokens


def make_tokenizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    files = {"tokenizer.json": tokenizer.to_str().encode(), "chat_template.jinja": TEMPLATE.encode()}
    return Tokenizer({**files, "tokenizer_config.json": json.dumps({}).encode()})


TOKENIZER = make_tokenizer()
IMAGE = TOKENIZER.added_tokens["<image>"]
INPUT = ImageInput(
    token_id=IMAGE, token="<image>", placeholder="<image>", unit=32, min_pixels=1024, max_pixels=2**20, resample=3
)
PROMPTS = PromptTokenizer(TOKENIZER, INPUT, None)


def with_images(prompt: Any, *images: Any, key: str = "prompt") -> dict[str, Any]:
    return {key: prompt, "multi_modal_data": {"image": list(images)}}


def places(prompt: Any) -> list[tuple[int, int]]:
    return [(image.offset, image.num_tokens) for image in PROMPTS.tokenize(prompt).images]


def data_url(image: Image.Image) -> str:
    file = BytesIO()
    image.save(file, "PNG")
    return "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()


def test_each_placeholder_in_text_becomes_as_many_tokens_as_its_image_has() -> None:
    prompt = PROMPTS.tokenize(with_images("<image>one<image>two", RED, BLUE))
    expected = [IMAGE] * 2 + TOKENIZER.encode("one") + [IMAGE] * 6 + TOKENIZER.encode("two")
    assert prompt.token_ids == expected
    assert [(image.offset, image.num_tokens) for image in prompt.images] == [(0, 2), (expected.index(IMAGE, 2), 6)]
    assert prompt.images[0].pixels == b"\xff\0\0" * (64 * 32)
    assert prompt.text == "<image>one<image>two"


def test_one_image_needs_no_list() -> None:
    assert PROMPTS.tokenize({"prompt": "<image>", "multi_modal_data": {"image": RED}}).token_ids == [IMAGE] * 2


def test_token_ids_have_the_image_token_once_or_expanded() -> None:
    once = with_images([7, IMAGE, 8, IMAGE], RED, BLUE, key="prompt_token_ids")
    expanded = with_images([7, *[IMAGE] * 2, 8, *[IMAGE] * 6], RED, BLUE, key="prompt_token_ids")
    assert PROMPTS.tokenize(once) == PROMPTS.tokenize(expanded)
    assert places(once) == [(1, 2), (4, 6)]


def test_chat_images_are_those_of_pillow_and_of_data_urls() -> None:
    parts: list[dict[str, Any]] = [
        {"type": "text", "text": "one"},
        {"type": "image_pil", "image_pil": RED},
        {"type": "image_url", "image_url": {"url": data_url(BLUE)}},
        {"image_url": data_url(RED)},
    ]
    messages: list[dict[str, Any]] = [{"role": "system", "content": "Hi"}, {"role": "user", "content": parts}]
    prompt = PROMPTS.tokenize_chat(messages, ChatOptions())
    text = f"system: Hi;user: one{'<image>' * 10};"
    assert prompt.token_ids == TOKENIZER.encode(text, add_special_tokens=False)
    first, second, third = prompt.images
    assert (first.num_tokens, second.num_tokens) == (2, 6)
    assert first.hash == third.hash != second.hash


@pytest.mark.parametrize(
    ("prompt", "sentence"),
    [
        (with_images("no placeholder", RED), "0 times '<image>'.* but 1 images"),
        (with_images("<image><image>", RED), "2 times '<image>'.* but 1 images"),
        (with_images([IMAGE, 5], RED, BLUE, key="prompt_token_ids"), "fewer '<image>' than its images have tokens"),
        (with_images("<image>", "https://cats.example/1.png"), "only data URLs can be read offline"),
        (with_images("<image>", "data:image/png,abc"), "must be base64"),
        (with_images("<image>", "data:image/png;base64,?"), "not base64"),
        (with_images("<image>", 5), "must be a PIL.Image.Image, got int"),
        ({"prompt": "a", "multi_modal_data": {"video": [1]}}, "images and audio only, got video"),
        ({"prompt": "a", "mm_processor_kwargs": {"max_pixels": 5}}, "mm_processor_kwargs is not supported"),
    ],
)
def test_bad_images_are_refused(prompt: Any, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        PROMPTS.tokenize(prompt)


def test_other_media_in_a_chat_are_refused_by_name() -> None:
    messages = [{"role": "user", "content": [{"type": "video_url", "video_url": {"url": "data:,"}}]}]
    with pytest.raises(ValueError, match="text, image_url or image_pil, got video_url"):
        PROMPTS.tokenize_chat(messages, ChatOptions())


def test_a_model_without_images_refuses_them() -> None:
    with pytest.raises(ValueError, match="the model reads no images"):
        PromptTokenizer(TOKENIZER, None, None).tokenize(with_images("<image>", RED))


def test_more_images_than_the_limit_are_refused() -> None:
    with pytest.raises(ValueError, match="a prompt has 2 images, limit_mm_per_prompt allows 1"):
        PromptTokenizer(TOKENIZER, INPUT, 1).tokenize(with_images("<image><image>", RED, RED))
