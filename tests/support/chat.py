"""A short greedy chat request through the OpenAI client."""

import json
from collections.abc import Mapping
from typing import Any

from openai import OpenAI
from tokenizers import AddedToken, Tokenizer

from support.tokenizers import byte_level_tokenizer

QUESTION = "What is the capital of France?"


def deltas(client: OpenAI, question: str = QUESTION, headers: Mapping[str, str] | None = None) -> list[str]:
    """The text of each chunk of the streamed response."""
    messages: Any = [{"role": "user", "content": question}]
    stream = client.chat.completions.create(
        model="proa-builtin", messages=messages, temperature=0, max_tokens=48, stream=True, extra_headers=headers
    )
    return [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]


def ask(client: OpenAI, question: str = QUESTION, headers: Mapping[str, str] | None = None) -> str:
    """The text of the response."""
    return "".join(deltas(client, question, headers))


_TOOLS_AS_JSON = "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
# For each style of real templates: a small template, and whether it takes the arguments of calls as text.
TOOL_TEMPLATES: Mapping[str, tuple[str, bool]] = {
    # Qwen2.5, Qwen3: JSON objects in tags; results are grouped in one user message
    "hermes": (
        _TOOLS_AS_JSON
        + """{%- for message in messages %}
{%- if message.role == "tool" %}
{%- if loop.first or messages[loop.index0 - 1].role != "tool" %}{{ '<|im_start|>user' }}{% endif %}
{{- '\n<tool_response>\n' + message.content + '\n</tool_response>' }}
{%- if loop.last or messages[loop.index0 + 1].role != "tool" %}{{ '<|im_end|>\n' }}{% endif %}
{%- else %}
{{- '<|im_start|>' + message.role + '\n' + (message.content if message.content is string else '') }}
{%- if message.tool_calls %}
{%- for tool_call in message.tool_calls %}
{%- if tool_call.function %}{%- set tool_call = tool_call.function %}{%- endif %}
{{- '\n<tool_call>\n{"name": "' + tool_call.name + '", "arguments": ' }}
{%- if tool_call.arguments is string %}{{ tool_call.arguments }}{% else %}{{ tool_call.arguments | tojson }}{% endif %}
{{- '}\n</tool_call>' }}
{%- endfor %}
{%- endif %}
{{- '<|im_end|>\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}
{%- if enable_thinking is defined %}{{ '<think>\n' if enable_thinking else '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}""",
        False,
    ),
    # Qwen3-Coder: one tag for each argument
    "qwen3_coder": (
        _TOOLS_AS_JSON
        + """{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\n' + (message.content or '') }}
{%- for tool_call in message.tool_calls or [] %}
{{- '\n<tool_call>\n<function=' + tool_call.function.name + '>\n' }}
{%- for name, value in tool_call.function.arguments | items %}
{{- '<parameter=' + name + '>\n' }}
{{- (value | tojson if value is mapping or (value is sequence and value is not string) else value | string) }}
{{- '\n</parameter>\n' }}
{%- endfor %}
{{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|im_end|>\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}""",
        False,
    ),
    # DeepSeek V3, R1: the text of the arguments is concatenated
    "deepseek_v3": (
        _TOOLS_AS_JSON
        + """{%- for message in messages %}
{%- if message.role == 'assistant' and message['content'] is none %}
{%- for tool in message['tool_calls'] %}
{{- '<|tool_call|>' + tool['type'] + '<|sep|>' + tool['function']['name'] + '\n```json\n' }}
{{- '' + tool['function']['arguments'] + '\n' + '```' }}
{%- endfor %}
{%- else %}{{ '<|' + message.role + '|>' + message.content }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|Assistant|>' }}{% endif %}""",
        True,
    ),
    # Gemma: values by their types
    "by_type": (
        _TOOLS_AS_JSON
        + """{%- for message in messages %}
{{- '[' ~ message.role ~ ' ' ~ (message.name or '') ~ ']' ~ message.content }}
{%- for call in message.tool_calls or [] %}
{{- 'call:' ~ call.function.name ~ '{' }}
{%- if call.function.arguments is mapping %}
{%- for key, value in call.function.arguments | dictsort %}{{ key ~ ':' ~ value ~ ',' }}{% endfor %}
{%- else %}{{ call.function.arguments }}{% endif %}
{{- '}' }}
{%- endfor %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[model]' }}{% endif %}""",
        False,
    ),
}
"""Chat templates that write tools and calls as those of model families do."""


def tool_tokenizer_files(name: str = "hermes") -> dict[str, bytes]:
    """Files of a model with one of `TOOL_TEMPLATES` and the tokens of the hermes format. Token 0 is `<eos>`."""
    config = {"eos_token": "<eos>", "chat_template": TOOL_TEMPLATES[name][0]}
    return {
        "tokenizer.json": tool_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }


def tool_tokenizer() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.add_tokens([AddedToken(text, special=False) for text in ("</think>", "<tool_call>", "</tool_call>")])
    return tokenizer
