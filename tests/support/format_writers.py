"""How models of each tool format write calls. Spelled apart from the formats, which are checked against it."""
# ruff: noqa: RUF001 - DeepSeek's tokens have a fullwidth bar

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from proa_gateway.parsing.format import ToolFormat
from proa_gateway.parsing.formats import (
    DEEPSEEK_V3,
    DEEPSEEK_V4,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    FUNCTIONGEMMA,
    GEMMA4,
    GLM45,
    GLM47,
    HARMONY,
    HERMES,
    KIMI_K2,
    LFM2,
    LLAMA3_JSON,
    MINIMAX_M2,
    MISTRAL,
    MISTRAL_V11,
    MISTRAL_V13,
    OLMO3,
    PYTHONIC,
    QWEN3_CODER,
)

Call = tuple[str, Mapping[str, object]]  # name and arguments
Write = Callable[[Sequence[Call]], str]

THINK = ("<think>", "</think>")


@dataclass(frozen=True, slots=True)
class Writer:
    """`tokens`: that the models' tokenizers have of the format. `calls`: writes a message's calls.
    `reasoning`: what stands before and after it; None: the format has none. `may_be_text`: the format is also read from
    tokenizers without the tokens."""

    tool_format: ToolFormat
    tokens: tuple[str, ...]
    calls: Write
    reasoning: tuple[str, str] | None = ("<think>\n", "\n</think>\n\n")
    may_be_text: bool = True

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
    ),
]
