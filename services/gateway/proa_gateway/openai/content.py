"""A message's content in the form that a chat template reads: text, or parts."""

from collections.abc import Mapping
from typing import Any, Literal

from proa.chat_template import ChatTemplate
from proa.template_content import PARTS, TEXT, ContentForms, text_part
from proa_gateway.openai.content_parts import ImagePart, Part, text_of

TemplateContent = str | list[dict[str, Any]]
ContentFormat = Literal["auto", "string", "openai"]
"""vLLM's names: what the template reads, always text, or always parts."""
_FORMAT_FORMS = {"string": TEXT, "openai": PARTS}


def forms_of(template: ChatTemplate, content_format: ContentFormat) -> Mapping[str, ContentForms]:
    """By role."""
    return (
        template.content_forms
        if content_format == "auto"
        else dict.fromkeys(("user", "system", "assistant", "tool"), _FORMAT_FORMS[content_format])
    )


def as_read(content: str | list[Part] | None, forms: ContentForms, placeholder: str = "") -> TemplateContent:
    """The content in a form that the template reads: that in which it was sent, if possible.

    Templates write an image's placeholder for a part of the type `image`. Without parts, `placeholder` comes before the
    text, once for each image and on lines of their own, as in vLLM.
    """
    if isinstance(content, list) and forms.parts:
        return [{"type": "image"} if isinstance(part, ImagePart) else part for part in content]
    text = text_of(content)
    if isinstance(content, list) and (images := [placeholder for part in content if isinstance(part, ImagePart)]):
        text = "\n".join([*images, text] if text else images)
    return text if forms.text else list(text_part(text))


def append_text(content: TemplateContent, text: str) -> TemplateContent:
    """Parts are copied; text is appended to the last one of them, or comes after an image."""
    if isinstance(content, str):
        return content + text
    *before, last = content or text_part("")
    if "text" not in last:
        return [*before, last, *text_part(text)]
    return [*before, {**last, "text": last["text"] + text}]
