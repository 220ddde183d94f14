"""How models of each tool format write calls. Spelled apart from the formats, which are checked against it."""
# ruff: noqa: RUF001 - DeepSeek's tokens have a fullwidth bar

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.formats import FUNCTIONGEMMA, GEMMA4, LFM2, OLMO3, PYTHONIC
from proa_gateway.parsing.json_formats import (
    APERTUS,
    COHERE,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    ERNIE45,
    FUNCTIONARY,
    GIGACHAT3,
    HARMONY,
    HERMES,
    HUNYUAN_A13B,
    INTERNLM,
    JAMBA,
    KIMI_K2,
    LLAMA3_JSON,
    LONGCAT,
    MINIMAX_M1,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    NEMOTRON_NANO_V2,
    PHI4_MINI,
    SOLAR_OPEN,
)
from proa_gateway.parsing.tagged_formats import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    GLM45,
    GLM47,
    HY_V3,
    HY_V3_OPENSOURCE,
    KIMI_K3,
    MINICPM5,
    MINIMAX_M2,
    MINIMAX_M3,
    MUSE_GLIMMER,
    QWEN3_CODER,
    SEED_OSS,
    STEP3,
)

Call = tuple[str, Mapping[str, object]]  # name and arguments
Write = Callable[[Sequence[Call]], str]

THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Writer:
    """`tokens`: that the models' tokenizers have of the format. `calls`: writes a message's calls.
    `reasoning`: what stands before and after it; None: the format has none. `may_be_text`: the format is also read from
    tokenizers without the tokens. `answer`: what stands before content that is constrained."""

    tool_format: ToolFormat
    tokens: tuple[str, ...]
    calls: Write
    reasoning: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    may_be_text: bool = True
    answer: str = ""

    @property
    def allows_content(self) -> bool:
        """Whether text may stand before and after calls."""
        return not self.tool_format.at_start and self.tool_format.channels is None


def _each(write: Callable[[int, str, Mapping[str, object]], str], between: str, section: str = "$") -> Write:
    def calls(calls: Sequence[Call]) -> str:
        written = between.join(write(index, name, arguments) for index, (name, arguments) in enumerate(calls))
        return section.replace("$", written)

    return calls


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _items(arguments: Mapping[str, object], write: Callable[[str, str, bool], str]) -> str:
    """Arguments in tags: strings as they are, others as JSON."""
    return "".join(
        write(key, value if isinstance(value, str) else _json(value), isinstance(value, str))
        for key, value in arguments.items()
    )


def _hermes(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {_json(arguments)}}}\n</tool_call>'


def _qwen3_coder(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f"<parameter={key}>\n{value}\n</parameter>\n")
    return f"<tool_call>\n<function={name}>\n{items}</function>\n</tool_call>"


def _glm45(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n")
    return f"<tool_call>{name}\n{items}</tool_call>"


def _glm47(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f"<arg_key>{key}</arg_key><arg_value>{value}</arg_value>")
    return f"<tool_call>{name}{items}</tool_call>"


def _minimax_m2(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f'<parameter name="{key}">{value}</parameter>\n')
    return f'<invoke name="{name}">\n{items}</invoke>'


def _dsml(index: int, name: str, arguments: Mapping[str, object]) -> str:
    def item(key: str, value: str, is_string: bool) -> str:
        return f'<｜DSML｜parameter name="{key}" string="{_json(is_string)}">{value}</｜DSML｜parameter>\n'

    return f'<｜DSML｜invoke name="{name}">\n{_items(arguments, item)}</｜DSML｜invoke>'


def _deepseek_v3(index: int, name: str, arguments: Mapping[str, object]) -> str:
    call = f"function<｜tool▁sep｜>{name}\n```json\n{_json(arguments)}\n```"
    return f"<｜tool▁call▁begin｜>{call}<｜tool▁call▁end｜>"


def _deepseek_v31(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{_json(arguments)}<｜tool▁call▁end｜>"


def _kimi_k2(index: int, name: str, arguments: Mapping[str, object]) -> str:
    header = f"<|tool_call_begin|>functions.{name}:{index}<|tool_call_argument_begin|>"
    return f"{header}{_json(arguments)}<|tool_call_end|>"


def _envelope(arguments_key: str) -> Callable[[int, str, Mapping[str, object]], str]:
    return lambda index, name, arguments: f'{{"name": "{name}", "{arguments_key}": {_json(arguments)}}}'


def _mistral_v11(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]Ab3dEf{index:03}[ARGS]{_json(arguments)}"


def _mistral_v13(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"[TOOL_CALLS]{name}[ARGS]{_json(arguments)}"


def _python(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"{name}({', '.join(f'{key}={value!r}' for key, value in arguments.items())})"


def _object(quote: str) -> Callable[[object], str]:
    def write(value: object) -> str:
        if isinstance(value, str):
            return f"{quote}{value}{quote}"
        if isinstance(value, list):
            return f"[{','.join(map(write, value))}]"
        if isinstance(value, dict):
            return f"{{{','.join(f'{key}:{write(item)}' for key, item in value.items())}}}"
        return json.dumps(value)

    return write


def _gemma4(index: int, name: str, arguments: Mapping[str, object]) -> str:
    written = _object('<|"|>')(arguments)
    return f"<|tool_call>call:{name}{written}<tool_call|>"


def _functiongemma(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"<start_function_call>call:{name}{_object('<escape>')(arguments)}<end_function_call>"


def _harmony(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"<|channel|>commentary to=functions.{name} <|constrain|>json<|message|>{_json(arguments)}"


def _seed_oss(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f"<parameter={key}>{value}</parameter>\n")
    return f"<seed:tool_call>\n<function={name}>\n{items}</function>\n</seed:tool_call>"


def _hy_v3(suffix: str) -> Callable[[int, str, Mapping[str, object]], str]:
    def write(index: int, name: str, arguments: Mapping[str, object]) -> str:
        def item(key: str, value: str, is_string: bool) -> str:
            begin = f"<arg_key{suffix}>{key}</arg_key{suffix}>\n"
            return f"{begin}<arg_value{suffix}>{value}</arg_value{suffix}>\n"

        return f"<tool_call{suffix}>{name}<tool_sep{suffix}>\n{_items(arguments, item)}</tool_call{suffix}>"

    return write


def _hy_v3_tokens(suffix: str) -> tuple[str, ...]:
    names = ("tool_calls", "tool_call", "arg_key", "arg_value", "think")
    return (f"<tool_sep{suffix}>", *(f"<{side}{name}{suffix}>" for name in names for side in ("", "/")))


def _minimax_m3(index: int, name: str, arguments: Mapping[str, object]) -> str:
    mark = "]<]minimax[>["

    def written(value: object) -> str:
        pairs = (
            value.items()
            if isinstance(value, dict)
            else [("item", part) for part in value]
            if isinstance(value, list)
            else None
        )
        if pairs is None:
            return value if isinstance(value, str) else _json(value)
        return "".join(f"{mark}<{key}>{written(part)}{mark}</{key}>" for key, part in pairs)

    return f'{mark}<invoke name="{name}">{written(dict(arguments))}{mark}</invoke>'


def _kimi_k3(index: int, name: str, arguments: Mapping[str, object]) -> str:
    types = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}

    def item(key: str, value: object) -> str:
        written = value if isinstance(value, str) else _json(value)
        type_ = types.get(type(value), "null")
        return f'<|open|>argument key="{key}" type="{type_}"<|sep|>{written}<|close|>argument<|sep|>'

    items = "".join(item(key, value) for key, value in arguments.items())
    return f'<|open|>call tool="{name}" index="{index + 1}"<|sep|>{items}<|close|>call<|sep|>'


def _muse_glimmer(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f'<atem:parameter name="{key}">{value}</atem:parameter>\n')
    invoke = f'<atem:invoke name="{name}">\n{items}</atem:invoke>'
    return f" to={name}<|message|><atem:function_calls>\n{invoke}\n</atem:function_calls>"


def _minicpm5(index: int, name: str, arguments: Mapping[str, object]) -> str:
    def item(key: str, value: str, is_string: bool) -> str:
        is_quoted = is_string and any(mark in value for mark in "<>&\"'")
        return f'<param name="{key}">{f"<![CDATA[{value}]]>" if is_quoted else value}</param>'

    return f'<function name="{name}">{_items(arguments, item)}</function>'


def _step3(index: int, name: str, arguments: Mapping[str, object]) -> str:
    items = _items(arguments, lambda key, value, _: f'<steptml:parameter name="{key}">{value}</steptml:parameter>\n')
    invoke = f'<steptml:invoke name="{name}">\n{items}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{invoke}<｜tool_call_end｜>"


def _apertus(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f'{{"{name}": {_json(arguments)}}}'


def _cohere(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f'{{"tool_call_id": "{index}", "tool_name": "{name}", "parameters": {_json(arguments)}}}'


def _functionary(index: int, name: str, arguments: Mapping[str, object]) -> str:
    return f"<function={name}>{_json(arguments)}</function>"


def _solar_open(index: int, name: str, arguments: Mapping[str, object]) -> str:
    header = f"<|tool_call:begin|>ab12cd34e{index}<|tool_call:name|>{name}<|tool_call:args|>"
    return f"{header}{_json(arguments)}<|tool_call:end|>"


_OBJECT = _envelope("arguments")


def _tagged_object(opening: str, closing: str) -> Callable[[int, str, Mapping[str, object]], str]:
    return lambda index, name, arguments: f"{opening}{_OBJECT(index, name, arguments)}{closing}"


_ARG_TOKENS = ("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", *THINK)
_DEEPSEEK_TOKENS = (
    *(
        "<｜tool▁calls▁begin｜>",
        "<｜tool▁calls▁end｜>",
        "<｜tool▁call▁begin｜>",
        "<｜tool▁call▁end｜>",
        "<｜tool▁sep｜>",
    ),
    *THINK,
)
_DEEPSEEK_SECTION = "<｜tool▁calls▁begin｜>$<｜tool▁calls▁end｜>"
_KIMI_TOKENS = (
    *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    *("<|tool_call_begin|>", "<|tool_call_argument_begin|>", "<|tool_call_end|>"),
    *THINK,
)
_MISTRAL_THINK = ("[THINK]", "[/THINK]")

WRITERS = [
    Writer(HERMES, ("<tool_call>", "</tool_call>", *THINK), _each(_hermes, "\n")),
    Writer(QWEN3_CODER, ("<tool_call>", "</tool_call>", *THINK), _each(_qwen3_coder, "\n")),
    Writer(GLM45, _ARG_TOKENS, _each(_glm45, "\n")),
    Writer(GLM47, _ARG_TOKENS, _each(_glm47, "")),
    Writer(
        MINIMAX_M2,
        ("<minimax:tool_call>", "</minimax:tool_call>", *THINK),
        _each(_minimax_m2, "\n", "<minimax:tool_call>\n$\n</minimax:tool_call>"),
    ),
    Writer(DEEPSEEK_V3, _DEEPSEEK_TOKENS, _each(_deepseek_v3, "\n", _DEEPSEEK_SECTION)),
    Writer(DEEPSEEK_V31, _DEEPSEEK_TOKENS, _each(_deepseek_v31, "", _DEEPSEEK_SECTION)),
    Writer(
        DEEPSEEK_V32,
        ("｜DSML｜", *THINK),
        _each(_dsml, "\n", "<｜DSML｜function_calls>\n$\n</｜DSML｜function_calls>"),
    ),
    Writer(DEEPSEEK_V4, ("｜DSML｜", *THINK), _each(_dsml, "\n", "<｜DSML｜tool_calls>\n$\n</｜DSML｜tool_calls>")),
    Writer(KIMI_K2, _KIMI_TOKENS, _each(_kimi_k2, "", "<|tool_calls_section_begin|>$<|tool_calls_section_end|>")),
    Writer(
        MISTRAL,
        ("[TOOL_CALLS]", *_MISTRAL_THINK),
        _each(_envelope("arguments"), ", ", "[TOOL_CALLS] [$]"),
        reasoning=_MISTRAL_THINK,
    ),
    Writer(
        MISTRAL_V11,
        ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]", *_MISTRAL_THINK),
        _each(_mistral_v11, ""),
        reasoning=_MISTRAL_THINK,
    ),
    Writer(MISTRAL_V13, ("[TOOL_CALLS]", "[ARGS]", *_MISTRAL_THINK), _each(_mistral_v13, ""), reasoning=_MISTRAL_THINK),
    Writer(
        APERTUS,
        ("<|tools_prefix|>", "<|tools_suffix|>", "<|inner_prefix|>", "<|inner_suffix|>"),
        _each(_apertus, ", ", "<|tools_prefix|>[$]<|tools_suffix|>"),
        reasoning=("<|inner_prefix|>", "<|inner_suffix|>"),
    ),
    Writer(
        COHERE,
        (
            *("<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>"),
            *("<|START_THINKING|>", "<|END_THINKING|>"),
        ),
        _each(_cohere, ",\n    ", "<|START_ACTION|>[\n    $\n]<|END_ACTION|>"),
        reasoning=("<|START_THINKING|>", "<|END_THINKING|>"),
    ),
    Writer(ERNIE45, ("<tool_call>", "</tool_call>", "<response>", "</response>", *THINK), _each(_hermes, "\n")),
    Writer(FUNCTIONARY, (), _each(_functionary, ""), reasoning=None),
    Writer(
        GIGACHAT3,
        ("<|function_call|>", "<|role_sep|>", "<|message_sep|>"),
        _each(_tagged_object("<|function_call|>", ""), ""),
        reasoning=None,
    ),
    Writer(
        INTERNLM,
        ("<|action_start|>", "<|plugin|>", "<|action_end|>"),
        _each(
            _envelope("parameters"),
            "<|action_end|>\n<|action_start|><|plugin|>\n",
            "<|action_start|><|plugin|>\n$<|action_end|>",
        ),
        reasoning=None,
    ),
    Writer(
        LONGCAT,
        ("<longcat_tool_call>", "</longcat_tool_call>", "<longcat_think>", "</longcat_think>"),
        _each(_tagged_object("<longcat_tool_call>\n", "\n</longcat_tool_call>"), "\n"),
        reasoning=("<longcat_think>\n", "\n</longcat_think>\n"),
    ),
    Writer(HUNYUAN_A13B, THINK, _each(_OBJECT, ", ", "<tool_calls>[$]</tool_calls>")),
    Writer(JAMBA, ("<tool_calls>", "</tool_calls>"), _each(_OBJECT, ",\n    ", "<tool_calls>[\n    $\n]</tool_calls>")),
    Writer(
        NEMOTRON_NANO_V2,
        ("<TOOLCALL>", "</TOOLCALL>", *THINK),
        _each(_OBJECT, ", ", "<TOOLCALL>[$]</TOOLCALL>"),
    ),
    Writer(MINIMAX_M1, (), _each(_OBJECT, "\n", "<tool_calls>\n$\n</tool_calls>")),
    Writer(PHI4_MINI, (), _each(_OBJECT, ", ", "functools[$]"), reasoning=None),
    Writer(
        SOLAR_OPEN,
        (
            *("<|tool_calls|>", "<|calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>"),
            *("<|tool_call:end|>", "<|think|>", "<|end|>", "<|begin|>", "<|content|>", "<|flush|>"),
        ),
        _each(_solar_open, "", "<|tool_calls|>$<|calls|>"),
        reasoning=("<|think|>", "<|end|><|begin|>assistant"),
    ),
    Writer(
        SEED_OSS,
        ("<seed:tool_call>", "</seed:tool_call>", "<seed:think>", "</seed:think>"),
        _each(_seed_oss, "\n"),
        reasoning=("<seed:think>", "</seed:think>"),
    ),
    Writer(
        HY_V3,
        _hy_v3_tokens(""),
        _each(_hy_v3(""), "\n", "<tool_calls>\n$\n</tool_calls>"),
        reasoning=THINK,
    ),
    Writer(
        HY_V3_OPENSOURCE,
        _hy_v3_tokens(":opensource"),
        _each(_hy_v3(":opensource"), "\n", "<tool_calls:opensource>\n$\n</tool_calls:opensource>"),
        reasoning=("<think:opensource>", "</think:opensource>"),
    ),
    Writer(
        KIMI_K3,
        ("<|open|>", "<|close|>", "<|sep|>"),
        _each(_kimi_k3, "", "<|open|>tools<|sep|>$<|close|>tools<|sep|>"),
        reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ),
    Writer(
        MINIMAX_M3,
        ("]<]minimax[>[", "<tool_call>", "</tool_call>", "<mm:think>", "</mm:think>"),
        _each(_minimax_m3, "\n", "]<]minimax[>[<tool_call>\n$\n]<]minimax[>[</tool_call>"),
        reasoning=("<mm:think>\n", "\n</mm:think>\n"),
    ),
    Writer(
        MUSE_GLIMMER,
        ("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        _each(_muse_glimmer, "<|eom|><|start|>assistant"),
        reasoning=(" to=self<|message|>", "<|eom|><|start|>assistant"),
        may_be_text=False,
        answer=" to=user<|message|>",
    ),
    Writer(MINICPM5, THINK, _each(_minicpm5, "\n")),
    Writer(
        STEP3,
        (
            *("<｜tool_calls_begin｜>", "<｜tool_calls_end｜>", "<｜tool_call_begin｜>", "<｜tool_call_end｜>"),
            *("<｜tool_sep｜>", *THINK),
        ),
        _each(_step3, "\n", "<｜tool_calls_begin｜>\n$\n<｜tool_calls_end｜>"),
    ),
    Writer(LLAMA3_JSON, ("<|python_tag|>",), _each(_envelope("parameters"), "; "), reasoning=None),
    Writer(PYTHONIC, ("<|python_start|>", "<|python_end|>"), _each(_python, ", ", "[$]"), reasoning=None),
    Writer(
        LFM2,
        ("<|tool_call_start|>", "<|tool_call_end|>", *THINK),
        _each(_python, ", ", "<|tool_call_start|>[$]<|tool_call_end|>"),
    ),
    Writer(OLMO3, THINK, _each(_python, "\n", "<function_calls>\n$\n</function_calls>")),
    Writer(
        GEMMA4,
        ("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
        _each(_gemma4, ""),
        reasoning=("<|channel>thought\n", "\n<channel|>"),
    ),
    Writer(
        FUNCTIONGEMMA,
        ("<start_function_call>", "<end_function_call>", "<escape>"),
        _each(_functiongemma, ""),
        reasoning=None,
    ),
    Writer(
        HARMONY,
        ("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>", "<|call|>", "<|return|>"),
        _each(_harmony, "<|call|><|start|>assistant"),
        reasoning=("<|channel|>analysis<|message|>", "<|end|><|start|>assistant"),
        may_be_text=False,
        answer="<|channel|>final<|message|>",
    ),
]
