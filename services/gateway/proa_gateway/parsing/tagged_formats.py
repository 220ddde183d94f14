"""Tool formats in which the arguments of calls stand in tags."""

# ruff: noqa: RUF001 - the tokens have a fullwidth bar

from dataclasses import replace

from proa_gateway.parsing.format import Channels, Route, Tagged, ToolFormat

_THINK = ("<think>", "</think>")

# DeepSeek since V3.2.
DEEPSEEK_V32 = ToolFormat(
    name="deepseek_v32",
    signs=("｜DSML｜", "function_calls>"),
    reasoning=_THINK,
    section=("<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    call='<｜DSML｜invoke name="$name">\n$arguments</｜DSML｜invoke>',
    between="\n",
    arguments=Tagged('<｜DSML｜parameter name="$key" string="$is_string">$value</｜DSML｜parameter>\n'),
)

DEEPSEEK_V4 = replace(
    DEEPSEEK_V32,
    name="deepseek_v4",
    signs=("｜DSML｜", "tool_calls>"),
    section=("<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
)

# GLM-4.5 and GLM-4.7: keys and values in tags, with and without lines.
GLM45 = ToolFormat(
    name="glm45",
    signs=("<arg_key>", "<arg_value>"),
    reasoning=_THINK,
    call="<tool_call>$name\n$arguments</tool_call>",
    between="\n",
    arguments=Tagged("<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"),
)

GLM47 = replace(
    GLM45,
    name="glm47",
    signs=("</arg_key><arg_value>",),
    call="<tool_call>$name$arguments</tool_call>",
    between="",
    arguments=Tagged("<arg_key>$key</arg_key><arg_value>$value</arg_value>"),
)

# MiniMax-M2: a section of calls in tags.
MINIMAX_M2 = ToolFormat(
    name="minimax_m2",
    signs=("<minimax:tool_call>", "<invoke name="),
    reasoning=_THINK,
    section=("<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    call='<invoke name="$name">\n$arguments</invoke>',
    between="\n",
    arguments=Tagged('<parameter name="$key">$value</parameter>\n'),
)

# Kimi K3: tags of three tokens, which all parts of a message have.
KIMI_K3 = ToolFormat(
    name="kimi_k3",
    signs=("<|open|>", "<|sep|>", "argument"),
    reasoning=("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    section=("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),
    call='<|open|>call tool="$name" index="$index"<|sep|>$arguments<|close|>call<|sep|>',
    arguments=Tagged('<|open|>argument key="$key" type="$type"<|sep|>$value<|close|>argument<|sep|>'),
    dropped=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
)

# MiniMax-M3: the tag of an argument is its name, and all tags have a mark before them.
_MARK = "]<]minimax[>["

MINIMAX_M3 = ToolFormat(
    name="minimax_m3",
    signs=(_MARK,),
    reasoning=("<mm:think>", "</mm:think>"),
    section=(f"{_MARK}<tool_call>\n", f"\n{_MARK}</tool_call>"),
    call=f'{_MARK}<invoke name="$name">$arguments{_MARK}</invoke>',
    between="\n",
    arguments=Tagged(f"{_MARK}<$key>$value{_MARK}</$key>"),
)

# Muse Glimmer: messages to the model itself, to the user, and to each tool, with a call in tags.
MUSE_GLIMMER = ToolFormat(
    name="muse_glimmer",
    signs=("<|message|>", "<atem:function_calls>"),
    call=' to=$name<|message|><atem:function_calls>\n<atem:invoke name="$name">\n'
    "$arguments</atem:invoke>\n</atem:function_calls>",
    between="<|eom|><|start|>assistant",
    arguments=Tagged('<atem:parameter name="$key">$value</atem:parameter>\n'),
    also_opens=('<atem:invoke name="',),
    channels=Channels(
        open="",
        body="<|message|>",
        close=("<|eom|>", "<|eot|>"),
        next="<|start|>assistant",
        routes=((r"to=self(?!\S)", Route.REASONING), (r"to=user(?!\S)", Route.CONTENT), (r"", Route.CALL)),
        reasoning=" to=self",
        preamble=" to=user",
        answer=" to=user",
        bare="to=",
    ),
)

# MiniCPM5: texts that could be taken for tags are quoted.
MINICPM5 = ToolFormat(
    name="minicpm5",
    signs=("<function name=", "<param name="),
    reasoning=_THINK,
    call='<function name="$name">$arguments</function>',
    between="\n",
    arguments=Tagged('<param name="$key">$value</param>', quotes=("<![CDATA[", "]]>")),
)

# Qwen3-Coder and Qwen3.5: calls in tags.
QWEN3_CODER = ToolFormat(
    name="qwen3_coder",
    signs=("<function=", "<parameter="),
    reasoning=_THINK,
    call="<tool_call>\n<function=$name>\n$arguments</function>\n</tool_call>",
    between="\n",
    arguments=Tagged("<parameter=$key>\n$value\n</parameter>\n"),
    also_opens=("<function=",),
)

# Seed-OSS: as Qwen3-Coder, with another tag around and no lines around values.
SEED_OSS = ToolFormat(
    name="seed_oss",
    signs=("<seed:tool_call>",),
    reasoning=("<seed:think>", "</seed:think>"),
    call="<seed:tool_call>\n<function=$name>\n$arguments</function>\n</seed:tool_call>",
    between="\n",
    arguments=Tagged("<parameter=$key>$value</parameter>\n"),
)


# Step 3: tags within a section of tokens.
STEP3 = ToolFormat(
    name="step3",
    signs=("<｜tool_calls_begin｜>", "steptml"),
    reasoning=_THINK,
    section=("<｜tool_calls_begin｜>\n", "\n<｜tool_calls_end｜>"),
    call='<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="$name">\n'
    "$arguments</steptml:invoke><｜tool_call_end｜>",
    between="\n",
    arguments=Tagged('<steptml:parameter name="$key">$value</steptml:parameter>\n'),
)


def _hy3(name: str, suffix: str) -> ToolFormat:
    """Hunyuan 3, whose releases have different suffixes of all tags."""
    key = f"<arg_key{suffix}>$key</arg_key{suffix}>\n"
    return ToolFormat(
        name=name,
        signs=("tool_sep", suffix) if suffix else ("<tool_sep>",),
        reasoning=(f"<think{suffix}>", f"</think{suffix}>"),
        section=(f"<tool_calls{suffix}>\n", f"\n</tool_calls{suffix}>"),
        call=f"<tool_call{suffix}>$name<tool_sep{suffix}>\n$arguments</tool_call{suffix}>",
        between="\n",
        arguments=Tagged(f"{key}<arg_value{suffix}>$value</arg_value{suffix}>\n"),
    )


HY_V3 = _hy3("hy_v3", "")
HY_V3_OPENSOURCE = _hy3("hy_v3_opensource", ":opensource")
