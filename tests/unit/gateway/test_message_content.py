"""Contents of messages, as text and as parts, in the forms that chat templates read."""

import asyncio
from typing import Any

import pytest
import transformers
from pydantic import ValidationError

from proa.chat_template import ChatTemplate
from proa.template_rules import ONE_PART, PARTS, TEXT, ContentForms
from proa_gateway.apis.chat.job import conversation_of
from proa_gateway.apis.chat.protocol import ChatCompletionRequest
from proa_gateway.errors import InvalidRequest
from proa_gateway.serving.chat_prompt import render_prompt, template_messages
from proa_gateway.serving.content import ContentFormat, ImagePart
from proa_gateway.serving.prompt import media_parts
from proa_gateway.tokenizer import TemplateRenderer
from support.tokenizers import byte_level_tokenizer

EITHER = ContentForms(text=True, parts=True)
_END = "{% if add_generation_prompt %}<assistant>{% endif %}"
TEXT_ONLY = "{% for m in messages %}<{{ m.role }}>{{ m['content'] + '\n' }}{% endfor %}" + _END
WRITTEN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}" + _END
JSON = "{% for m in messages %}<{{ m.role }}>{{ m.content | tojson }}\n{% endfor %}" + _END
# Qwen2-VL, Gemma 3, Llama 4
LOOP = (
    "{% for message in messages %}<{{ message.role }}>{% if message['content'] is string %}{{ message['content'] }}"
    "{% else %}{% for content in message['content'] %}{% if content['type'] == 'text' %}{{ content['text'] }}"
    "{% if 'note' in content %}({{ content.note }}){% endif %}{% endif %}{% endfor %}{% endif %}{{ '\n' }}{% endfor %}"
    + _END
)
# Qwen3-VL
IMAGES = LOOP.replace("{% endif %}{% endfor %}", "{% elif content.type == 'image' %}<img>{% endif %}{% endfor %}", 1)
# Qwen3.5
MACRO = (
    "{% macro render(content) %}{% if content is string %}{{ content }}{% else %}{% for item in content %}"
    "{{ item.text }}{% endfor %}{% endif %}{% endmacro %}"
    "{% for message in messages %}<{{ message.role }}>{{ render(message.content) | trim }}\n{% endfor %}" + _END
)
# SmolVLM
PARTS_ONLY = (
    "{% for message in messages %}<{{ message.role }}>{% for line in message['content'] %}"
    "{% if line['type'] == 'text' %}{{ line['text'] }}{% endif %}{% endfor %}{{ '\n' }}{% endfor %}" + _END
)
FIRST_PART = "{% for m in messages %}<{{ m.role }}>{{ m.content[0].text + '\n' }}{% endfor %}" + _END
# Pixtral: parts of the user only
USER_ONLY = (
    "{% for message in messages %}{% if message.role == 'user' and message.content is not string %}<user>"
    "{% for part in message.content %}{{ part.text }}{% endfor %}\n"
    "{% else %}<{{ message.role }}>{{ message.content + '\n' }}{% endif %}{% endfor %}" + _END
)
# Qwen3-ASR: the texts of the system's messages and the audios of all others
AUDIOS = (
    "{% for m in messages if m.role == 'system' %}<system>{{ m.content }}{% endfor %}"
    "{% for m in messages if m.content is not string %}{% for c in m.content if c.type == 'audio' %}<audio>{% endfor %}"
    "{% endfor %}" + _END
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + LOOP
IMAGE = {"type": "image_url", "image_url": {"url": "data:,", "detail": "low"}}
PART_LIST = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two.", "note": "x"}]


def render(source: str, messages: list[dict[str, Any]], content_format: ContentFormat = "auto", **fields: Any) -> str:
    request = ChatCompletionRequest.model_validate({"messages": messages, **fields})
    template, renderer, read = ChatTemplate(source), TemplateRenderer({}), template_messages(request.messages)
    prompt = render_prompt(conversation_of(request), read, template, renderer, content_format, placeholder="<img>")
    return asyncio.run(prompt)


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


@pytest.mark.parametrize(
    ("source", "users", "assistants"),
    [
        (TEXT_ONLY, TEXT, TEXT),
        (WRITTEN, TEXT, TEXT),
        (JSON, TEXT, TEXT),
        (LOOP, EITHER, EITHER),
        (MACRO, EITHER, EITHER),
        (PARTS_ONLY, PARTS, PARTS),
        (FIRST_PART, ONE_PART, ONE_PART),
        (USER_ONLY, EITHER, TEXT),
        (NO_SYSTEM, EITHER, EITHER),
        ("no messages", TEXT, TEXT),
    ],
)
def test_forms_are_those_that_the_template_reads(source: str, users: ContentForms, assistants: ContentForms) -> None:
    forms = ChatTemplate(source).content_forms
    assert (forms["user"], forms["assistant"], forms["tool"]) == (users, assistants, assistants)
    assert forms["system"] == (TEXT if source is NO_SYSTEM else assistants)


def test_audios_are_parts_for_a_template_that_leaves_out_the_users_texts() -> None:
    forms = ChatTemplate(AUDIOS).content_forms
    assert (forms["user"], forms["system"]) == (PARTS, TEXT)
    audio = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    assert render(AUDIOS, user([audio, *PART_LIST])) == "<audio><assistant>"


@pytest.mark.parametrize("source", [LOOP, MACRO, PARTS_ONLY, USER_ONLY])
def test_parts_are_rendered_as_by_transformers(source: str) -> None:
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=byte_level_tokenizer())
    expected = tokenizer.apply_chat_template(
        user(PART_LIST), chat_template=source, tokenize=False, add_generation_prompt=True
    )
    assert render(source, user(PART_LIST)) == expected
    assert "One.Two." in render(source, user(PART_LIST))


def test_a_parts_other_fields_reach_the_template() -> None:
    assert render(LOOP, user(PART_LIST)) == "<user>One.Two.(x)\n<assistant>"


@pytest.mark.parametrize("source", [TEXT_ONLY, WRITTEN])
def test_parts_are_joined_for_a_template_that_reads_text(source: str) -> None:
    assert render(source, user(PART_LIST)) == "<user>One.\nTwo.\n<assistant>"


def test_parts_are_joined_in_one_for_a_template_that_reads_the_first() -> None:
    assert render(FIRST_PART, user(PART_LIST)) == "<user>One.\nTwo.\n<assistant>"


@pytest.mark.parametrize("source", [TEXT_ONLY, LOOP, MACRO, PARTS_ONLY, FIRST_PART, USER_ONLY])
def test_text_is_text_for_every_template(source: str) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "Hello"}, *user("?")]
    assert render(source, messages) == "<user>Hi\n<assistant>Hello\n<user>?\n<assistant>"


@pytest.mark.parametrize("source", [TEXT_ONLY, LOOP, PARTS_ONLY])
@pytest.mark.parametrize("content", ["One", PART_LIST[:1], PART_LIST])
def test_a_message_of_each_form_is_continued(source: str, content: object) -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": content}]
    whole = render(source, messages)
    continued = render(source, messages, continue_final_message=True)
    assert whole.startswith(continued)
    assert continued.endswith(("One", "One.", "Two."))


def test_the_gateways_flag_forces_one_form() -> None:
    assert render(LOOP, user(PART_LIST), "string") == "<user>One.\nTwo.\n<assistant>"
    assert render(WRITTEN, user("Hi"), "openai") == "<user>[{'type': 'text', 'text': 'Hi'}]\n<assistant>"
    with pytest.raises(InvalidRequest, match="refuses the messages"):
        render(TEXT_ONLY, user("Hi"), "openai")


def test_images_keep_their_places_among_the_texts() -> None:
    assert render(IMAGES, user([PART_LIST[0], IMAGE, PART_LIST[0], IMAGE])) == "<user>One.<img>One.<img>\n<assistant>"
    messages = [*user([IMAGE]), {"role": "assistant", "content": [PART_LIST[0], IMAGE]}]
    assert render(IMAGES, messages, continue_final_message=True) == "<user><img>\n<assistant>One.<img>"


@pytest.mark.parametrize("source", [TEXT_ONLY, WRITTEN])
def test_images_come_before_the_text_for_a_template_that_reads_text(source: str) -> None:
    messages = [*user([PART_LIST[0], IMAGE, IMAGE]), *user([IMAGE])]
    assert render(source, messages) == "<user><img>\n<img>\nOne.\n<user><img>\n<assistant>"


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "https://a/b.png"}},
        {"type": "image_url", "image_url": "https://a/b.png", "uuid": "1"},
        {"type": "image_url", "image_url": {"url": "https://a/b.png", "detail": "high"}, "uuid": None},
    ],
)
def test_each_form_of_an_image_is_read(part: dict[str, Any]) -> None:
    request = ChatCompletionRequest.model_validate({"messages": [*user("Hi"), *user([part])]})
    assert list(media_parts(request.messages, "messages")) == [ImagePart("https://a/b.png", "messages[1].content[0]")]


THOUGHTS = (
    "{% for m in messages %}<{{ m.role }}>{% if m.reasoning_content %}({{ m.reasoning_content }}){% endif %}"
    "{{ m.content }}{% if m.tool_calls %}!{% endif %}{% endfor %}"
)
REFUSAL = {"type": "refusal", "refusal": "No."}
THINKING = {"type": "thinking", "thinking": "Hm."}
MISTRALS = {"type": "thinking", "thinking": [{"type": "text", "text": "So?"}], "closed": True}
CALLS = [{"function": {"name": "f", "arguments": "{}"}}]


@pytest.mark.parametrize(
    ("answer", "rendered"),
    [
        ({"content": [PART_LIST[0], REFUSAL]}, "One.\nNo."),
        ({"content": [THINKING, PART_LIST[0], MISTRALS]}, "(Hm.\nSo?)One."),
        ({"content": [THINKING]}, "(Hm.)"),
        ({"content": [THINKING], "tool_calls": CALLS}, "(Hm.)!"),
        ({"content": [THINKING, REFUSAL], "reasoning": "Hm, hm."}, "(Hm, hm.)No."),
    ],
)
def test_parts_of_the_assistant_are_read(answer: dict[str, Any], rendered: str) -> None:
    assert render(THOUGHTS, [{"role": "assistant", **answer}]) == f"<assistant>{rendered}"
    assert ChatTemplate(THOUGHTS).content_forms["assistant"] == TEXT


def test_thinking_is_no_text_of_a_template_that_reads_parts() -> None:
    messages = [{"role": "assistant", "content": [THINKING, PART_LIST[0], REFUSAL]}]
    assert render(PARTS_ONLY, messages) == "<assistant>One.No.\n<assistant>"


@pytest.mark.parametrize(
    ("part", "words"),
    [
        ({"type": "image_url"}, "without the text of a URL"),
        ({"type": "image_url", "image_url": {}}, "without the text of a URL"),
        ({"type": "image_url", "image_url": {"url": 5}}, "without the text of a URL"),
        ({"type": "image_url", "image_url": ""}, "without the text of a URL"),
        ({"type": "image_url", "image_url": "\ud800"}, "lone surrogate"),
        ({"type": "image_url", "uuid": "1"}, "images are not found by uuid"),
        ({"type": "input_audio", "input_audio": {}}, "an audio without its data"),
        ({"type": "audio_url", "audio_url": {"url": 5}}, "or the text of a URL"),
        ({"type": "video_url", "video_url": {"url": "x"}}, "'video_url'"),
        ({"type": "file", "file": {}}, "'file'"),
        (REFUSAL, "'refusal'.* in messages of the assistant"),
        (THINKING, "'thinking'.* in messages of the assistant"),
        ({"image_url": "x"}, "objects with a type"),
    ],
)
def test_other_parts_are_refused(part: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        ChatCompletionRequest.model_validate({"messages": user([part])})
