"""The formats of DeepSeek: JSON between tokens until V3.1, calls in tags since V3.2."""
# ruff: noqa: RUF001 - the tokens have a fullwidth bar

from dataclasses import replace

from proa_gateway.parsing.format import Json, Tagged, ToolFormat

DEEPSEEK_V3 = ToolFormat(
    name="deepseek_v3",
    signs=("<｜tool▁calls▁begin｜>", "```json"),
    reasoning=("<think>", "</think>"),
    section=("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    call="<｜tool▁call▁begin｜>function<｜tool▁sep｜>$name\n```json\n$arguments\n```<｜tool▁call▁end｜>",
    between="\n",
    arguments=Json(),
)

DEEPSEEK_V31 = replace(
    DEEPSEEK_V3,
    name="deepseek_v31",
    signs=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
    call="<｜tool▁call▁begin｜>$name<｜tool▁sep｜>$arguments<｜tool▁call▁end｜>",
    between="",
)

DEEPSEEK_V32 = replace(
    DEEPSEEK_V3,
    name="deepseek_v32",
    signs=("｜DSML｜", "function_calls>"),
    section=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    call='<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
    text_tokens=("｜DSML｜",),
    arguments=Tagged('<｜DSML｜parameter name="$key" string="$is_string">$value</｜DSML｜parameter>\n'),
)

DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek_v4",
    signs=("｜DSML｜", "tool_calls>"),
    section=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
)
