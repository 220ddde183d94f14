"""A message's content: text, or parts. Chat templates get the form that they read."""

from collections.abc import Mapping
from typing import Any, Literal

from proa.chat_template import ChatTemplate
from proa.template_content import PARTS, TEXT, ContentForms, text_part

Part = dict[str, Any]
Content = str | list[Part]
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


def text_of(content: Content | None) -> str:
    """Texts of parts are joined with newlines."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) else content or ""


def as_read(content: Content | None, forms: ContentForms) -> Content:
    """The content in a form that the template reads: that in which it was sent, if possible."""
    if isinstance(content, list) and forms.parts:
        return content
    return text_of(content) if forms.text else list(text_part(text_of(content)))


def append_text(content: Content, text: str) -> Content:
    """Parts are copied; text is appended to the last one of them."""
    if isinstance(content, str):
        return content + text
    *before, last = content or text_part("")
    return [*before, {**last, "text": last["text"] + text}]
