"""A fake model that reads images: its tokenizer, its chat template and the images that clients send."""

import json
from base64 import b64encode
from functools import cache
from typing import Any

from tokenizers import Tokenizer

from proa.contract import ImageInput
from proa.contract.pb import to_pb
from proa.engine.v1 import service_pb2
from support.fake_engine import FakeEngine, prompt_ids
from support.image_files import encoded, random_image
from support.tokenizers import byte_level_tokenizer

START, PAD, END = "<|vision_start|>", "<|image_pad|>", "<|vision_end|>"
PLACEHOLDER = START + PAD + END
# As Qwen3-VL's: also a tool's messages show images, the system's show texts only.
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}: {% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' and message.role != 'system' %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% elif 'text' in part %}{{ part.text }}{% endif %}{% endfor %}"
    "{% endif %}{{ '\n' }}{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
)
TEXT_TEMPLATE = "{% for message in messages %}{{ message.role }}: {{ message.content + '\n' }}{% endfor %}"


@cache
def _tokenizer_json() -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([START, PAD, END])
    return tokenizer.to_str()


def image_input() -> ImageInput:
    """Images of 32 x 64 pixels are 2 tokens, squares of 64 pixels 4."""
    token_id = next(each["id"] for each in json.loads(_tokenizer_json())["added_tokens"] if each["content"] == PAD)
    return ImageInput(
        token_id=token_id,
        token=PAD,
        placeholder=PLACEHOLDER,
        prefix=START,
        suffix=END,
        unit=32,
        min_pixels=32 * 32,
        max_pixels=128 * 128,
        resample=3,
    )


def image_engine(*, template: str = TEMPLATE, **settings: Any) -> FakeEngine:
    config = {"eos_token": "<eos>", "chat_template": template}
    files = {"tokenizer.json": _tokenizer_json().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    engine = FakeEngine(files=files, **settings)
    engine.info.images.CopyFrom(to_pb(service_pb2.ImageInput, image_input()))
    return engine


def prompt_of(engine: FakeEngine, number: int = -1) -> str:
    """The text of a request's prompt."""
    tokenizer = Tokenizer.from_buffer(engine.files["tokenizer.json"])
    return str(tokenizer.decode(prompt_ids(engine.requests[number]), skip_special_tokens=False))


def png(seed: int = 0, width: int = 64, height: int = 32) -> bytes:
    return encoded(random_image("RGB", width, height, seed), "PNG")


def data_url(seed: int = 0, width: int = 64, height: int = 32) -> str:
    return f"data:image/png;base64,{b64encode(png(seed, width, height)).decode()}"


def image_part(seed: int = 0, width: int = 64, height: int = 32) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(seed, width, height)}}


def user(*parts: str | dict[str, Any]) -> dict[str, Any]:
    """A message with these texts and parts."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"role": "user", "content": content}
