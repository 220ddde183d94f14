"""A small chat template for each format: its calls are read exactly, and its format is chosen by it."""
# ruff: noqa: RUF001 - the tokens have a fullwidth bar

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

import pytest

from proa.chat_template import ChatTemplate
from proa_gateway.parsing.choose import FormatChoice, choose_format
from proa_gateway.parsing.known_formats import BUILT_IN
from proa_gateway.serving.written_call import written_call
from proa_gateway.tokenizer import Tokenizer
from support.format_writers import WRITERS, Writer

CHAT = """{{ tools | tojson }}{% for message in messages %}<|turn|>{{ message.role }}
{{ message.content or "" }}
{%- if message.tool_calls %}{{ OPEN }}
{%- for call in message.tool_calls %}{% set f = call.function %}{{ "" if loop.first else BETWEEN }}
{%- filter trim %}CALL{% endfilter %}
{%- endfor %}{{ CLOSE }}{% endif %}<|turn_end|>
{% endfor %}{% if add_generation_prompt %}<|turn|>assistant
{% endif %}"""
IN_CHANNELS = """{{ tools | tojson }}{% for message in messages %}
{%- if message.tool_calls %}{% for call in message.tool_calls %}{% set f = call.function %}<|start|>assistant to=
{{- f.name }}<|message|>CALL<|{{ "eot" if loop.last else "eom" }}|>{% endfor %}
{%- else %}<|start|>{{ message.role }}<|message|>{{ message.content }}<|eot|>{% endif %}
{%- endfor %}{% if add_generation_prompt %}<|start|>assistant{% endif %}"""
ARGUMENTS = "{{ f.arguments | tojson }}"
OBJECT = f'{{"name": "{{{{ f.name }}}}", "arguments": {ARGUMENTS}}}'
PARAMETERS = f'{{"name": "{{{{ f.name }}}}", "parameters": {ARGUMENTS}}}'


def items(item: str) -> str:
    return f"{{% for key, value in f.arguments | items %}}{item}{{% endfor %}}"


MARK = "]<]minimax[>["
NL = '{{ "\\n" }}'
HY = items(f"<arg_keySUFFIX>{{{{ key }}}}</arg_keySUFFIX>{NL}<arg_valueSUFFIX>{{{{ value }}}}</arg_valueSUFFIX>{NL}")


@dataclass(frozen=True)
class Layout:
    """What a template writes of a message's calls. `more`: elsewhere in the template. `chat`: all around them."""

    call: str
    open: str = ""
    between: str = ""
    close: str = ""
    more: str = ""
    chat: str = CHAT

    @property
    def source(self) -> str:
        texts = {"OPEN": self.open, "BETWEEN": self.between, "CLOSE": self.close}
        source = self.chat.replace("CALL", self.call)
        for place, text in texts.items():
            source = source.replace(place, repr(text))
        return f"{{# {self.more} #}}{source}"


def hy(suffix: str) -> Layout:
    call = f"<tool_callSUFFIX>{{{{ f.name }}}}<tool_sepSUFFIX>{NL}{HY}</tool_callSUFFIX>".replace("SUFFIX", suffix)
    return Layout(call, f"<tool_calls{suffix}>\n", "\n", f"\n</tool_calls{suffix}>")


LAYOUTS = {
    "apertus": Layout(f'{{"{{{{ f.name }}}}": {ARGUMENTS}}}', "<|tools_prefix|>[", ", ", "]<|tools_suffix|>"),
    "cohere": Layout(
        f'{{"tool_call_id": "0", "tool_name": "{{{{ f.name }}}}", "parameters": {ARGUMENTS}}}',
        "<|START_ACTION|>[\n    ",
        ",\n    ",
        "\n]<|END_ACTION|>",
    ),
    "ernie45": Layout(f"<tool_call>{NL}{OBJECT}{NL}</tool_call>", between="\n", more="<response>"),
    "functionary": Layout(f"<function={{{{ f.name }}}}>{ARGUMENTS}</function>"),
    "gigachat3": Layout(f"<|function_call|>{OBJECT}", more="role_sep message_sep"),
    "internlm": Layout(f"<|action_start|><|plugin|>{NL}{PARAMETERS}<|action_end|>"),
    "longcat": Layout(f"<longcat_tool_call>{NL}{OBJECT}{NL}</longcat_tool_call>", between="\n"),
    "hunyuan_a13b": Layout(OBJECT, "<tool_calls>[", ", ", "]</tool_calls>"),
    "jamba": Layout('{{ "[\\n    " if loop.first }}' + OBJECT, "<tool_calls>", ",\n    ", "\n]</tool_calls>"),
    "nemotron_nano_v2": Layout(OBJECT, "<TOOLCALL>[", ", ", "]</TOOLCALL>"),
    "minimax_m1": Layout(OBJECT, "<tool_calls>\n", "\n", "\n</tool_calls>"),
    "phi4_mini_json": Layout(OBJECT, "functools[", ", ", "]"),
    "solar_open": Layout(
        "<|tool_call:begin|>{{ call.id }}<|tool_call:name|>{{ f.name }}"
        f"<|tool_call:args|>{ARGUMENTS}<|tool_call:end|>",
        "<|tool_calls|>",
        close="<|calls|>",
    ),
    "seed_oss": Layout(
        f"<seed:tool_call>{NL}<function={{{{ f.name }}}}>{NL}"
        + items(f"<parameter={{{{ key }}}}>{{{{ value }}}}</parameter>{NL}")
        + f"</function>{NL}</seed:tool_call>",
        between="\n",
    ),
    "kimi_k3": Layout(
        '<|open|>call tool="{{ f.name }}" index="{{ loop.index }}"<|sep|>'
        + items(
            '<|open|>argument key="{{ key }}" type="{{ "string" if value is string else "number" }}"<|sep|>'
            "{{ value }}<|close|>argument<|sep|>"
        )
        + "<|close|>call<|sep|>",
        "<|open|>tools<|sep|>",
        close="<|close|>tools<|sep|>",
    ),
    "minimax_m3": Layout(
        f'{MARK}<invoke name="{{{{ f.name }}}}">'
        + items(f"{MARK}<{{{{ key }}}}>{{{{ value }}}}{MARK}</{{{{ key }}}}>")
        + f"{MARK}</invoke>",
        f"{MARK}<tool_call>\n",
        "\n",
        f"\n{MARK}</tool_call>",
    ),
    "muse_glimmer": Layout(
        f'<atem:function_calls>{NL}<atem:invoke name="{{{{ f.name }}}}">{NL}'
        + items(f'<atem:parameter name="{{{{ key }}}}">{{{{ value }}}}</atem:parameter>{NL}')
        + f"</atem:invoke>{NL}</atem:function_calls>",
        chat=IN_CHANNELS,
    ),
    "minicpm5": Layout(
        '<function name="{{ f.name }}">'
        + items('<param name="{{ key }}">{{ "<![CDATA[x]]>" if value is string else value }}</param>')
        + "</function>",
        between="\n",
    ),
    "hy_v3": hy(""),
    "hy_v3_opensource": hy(":opensource"),
    "step3": Layout(
        f'<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="{{{{ f.name }}}}">{NL}'
        + items(f'<steptml:parameter name="{{{{ key }}}}">{{{{ value }}}}</steptml:parameter>{NL}')
        + "</steptml:invoke><｜tool_call_end｜>",
        "<｜tool_calls_begin｜>\n",
        "\n",
        "\n<｜tool_calls_end｜>",
    ),
}
WRITER = {writer.tool_format.name: writer for writer in WRITERS}
CASES = [
    (name, has_tokens) for name in LAYOUTS for has_tokens in (True, False) if has_tokens or WRITER[name].may_be_text
]


@dataclass
class TemplateTokenizer:
    """The part of a `Tokenizer` that is used."""

    template: ChatTemplate
    added_tokens: Mapping[str, int] = field(default_factory=dict)

    def template_for(self, *, tools: bool) -> ChatTemplate | None:
        return self.template if tools else None


@pytest.mark.parametrize(
    ("name", "has_tokens"), CASES, ids=[f"{name}-{'tokens' if has_tokens else 'text'}" for name, has_tokens in CASES]
)
def test_the_format_of_a_template_reads_its_call_and_is_chosen(name: str, has_tokens: bool) -> None:
    writer: Writer = WRITER[name]
    source = LAYOUTS[name].source
    tokens = {token: token_id for token_id, token in enumerate(writer.tokens if has_tokens else ())}
    written = written_call(cast(Tokenizer, TemplateTokenizer(ChatTemplate(source), tokens)))
    assert written is not None
    assert written.is_read_by(writer.tool_format), written.text
    choice = choose_format(None, None, source, BUILT_IN, written.is_read_by)
    assert choice == FormatChoice(choice.tool_format)
    assert choice.tool_format is not None
    assert choice.tool_format.name == name
