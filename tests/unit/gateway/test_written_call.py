"""Whether a format reads the call that a chat template writes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from proa.chat_template import ChatTemplate
from proa_gateway.parsing.formats import FORMATS, LFM2
from proa_gateway.parsing.json_formats import HARMONY, HERMES, LLAMA3_JSON
from proa_gateway.parsing.tagged_formats import QWEN3_CODER
from proa_gateway.serving.written_call import WrittenCall, written_call
from proa_gateway.tokenizer import Tokenizer
from support.chat import TOOL_TEMPLATES

CHAT = """{{ tools | tojson }}{% for message in messages %}<|im_start|>{{ message.role }}
{{ message.content or "" }}{% for call in message.tool_calls or [] %}CALL{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""
AS_HERMES = CHAT.replace("CALL", "<tool_call>\n{{ call.function | tojson }}\n</tool_call>")
HARMONY_TOKENS = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|end|>", "<|constrain|>", "<|return|>")


@dataclass
class TemplateTokenizer:
    """The part of a `Tokenizer` that is used."""

    template: ChatTemplate | None
    added_tokens: Mapping[str, int] = field(default_factory=dict)

    def template_for(self, *, tools: bool) -> ChatTemplate | None:
        return self.template if tools else None


def written(source: str | None, *tokens: str) -> WrittenCall | None:
    template = ChatTemplate(source) if source is not None else None
    added = {token: token_id for token_id, token in enumerate(tokens)}
    return written_call(cast(Tokenizer, TemplateTokenizer(template, added)))


def readers(source: str, *tokens: str) -> set[str]:
    """Names of the formats that read the template's call, without `ernie45`, whose calls are those of `hermes`."""
    call = written(source, *tokens)
    assert call is not None
    return {each.name for each in FORMATS if each.name != "ernie45" and call.is_read_by(each)}


def test_only_the_format_of_the_template_reads_its_call() -> None:
    assert readers(AS_HERMES) == {"hermes"}
    assert readers(AS_HERMES, "<tool_call>", "</tool_call>") == {"hermes"}


@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_calls_of_small_templates_are_read_by_the_format_of_that_name(name: str) -> None:
    source, _ = TOOL_TEMPLATES[name]
    assert readers(source) == {name}


def test_a_call_may_begin_as_the_generation_prompt_ends() -> None:
    thinking = AS_HERMES.replace("assistant\n{% endif %}", "assistant\n<think>\n{% endif %}")
    assert readers(thinking) == {"hermes"}


def test_a_call_may_begin_within_the_generation_prompt() -> None:
    inside = CHAT.replace("CALL", "{{ call.function | tojson }}").replace(
        "assistant\n{% endif %}", "assistant\n{{% endif %}"
    )
    assert LLAMA3_JSON.name in readers(inside.replace("{{% endif", "{{ '{' }}{% endif"))


def test_a_call_with_other_arguments_is_not_read() -> None:
    call = written(AS_HERMES.replace("call.function", "{'name': call.function.name, 'arguments': {}}"))
    assert call is not None
    assert not call.is_read_by(HERMES)


def test_a_call_in_a_channel_begins_with_its_header() -> None:
    source = """{{ tools }}{% for message in messages %}<|start|>{{ message.role }}
{%- if message.tool_calls %} to=functions.{{ message.tool_calls[0].function.name }}<|channel|>commentary json<|message|>
{{- message.tool_calls[0].function.arguments | tojson }}<|call|>
{%- else %}<|message|>{{ message.content }}<|end|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
    call = written(source, *HARMONY_TOKENS)
    assert call is not None
    assert call.is_read_by(HARMONY)
    assert not call.is_read_by(QWEN3_CODER)


@pytest.mark.parametrize(
    "refused", ["message.tool_calls and loop.last", "message.content is none or message.content is not defined"]
)
def test_templates_that_want_a_result_or_a_text_write_their_call(refused: str) -> None:
    refusal = f"{{% if {refused} %}}{{{{ raise_exception('no') }}}}{{% endif %}}"
    assert readers(AS_HERMES.replace("<|im_start|>{{", refusal + "<|im_start|>{{")) == {"hermes"}


@pytest.mark.parametrize(
    "source",
    [
        None,
        AS_HERMES.replace("tools", "functions"),
        CHAT.replace("CALL", ""),
        AS_HERMES.replace("{{ tools", "{% if messages[1] %}{{ raise_exception('no') }}{% endif %}{{ tools"),
    ],
    ids=["no template", "no tools", "leaves calls out", "refuses calls"],
)
def test_there_is_no_call_to_compare(source: str | None) -> None:
    assert written(source) is None


def test_calls_of_llama_4_begin_with_marks_of_python() -> None:
    source = CHAT.replace(
        "CALL", "<|python_start|><|python_end|>{{ {'name': 'lookup', 'parameters': call.function.arguments} | tojson }}"
    )
    call = written(source)
    assert call is not None
    assert call.is_read_by(LLAMA3_JSON)
    assert not call.is_read_by(LFM2)
