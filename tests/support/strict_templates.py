"""Chat templates that do not read every conversation, one rule each, as published ones have them."""

from collections.abc import Mapping

from proa.template_rules import TemplateRules

_CALLS = """{% for call in m.tool_calls or [] %}\
[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"""
_CONTENT = "{{ m.content or '' }}"
_END = "{% if add_generation_prompt %}<assistant>{% endif %}"


def _template(checks: str = "", content: str = _CONTENT, calls: str = _CALLS, prologue: str = "") -> str:
    """`checks`: run for each message `m`, which writes its `content` and its `calls`."""
    message = f"<{{{{ m.role }}}}>{content}{calls}</end>\n"
    return f"{prologue}{{% for m in messages %}}{checks}{message}{{% endfor %}}{_END}"


def _raise(condition: str) -> str:
    return f"{{% if {condition} %}}{{{{ raise_exception('refused') }}}}{{% endif %}}"


def _skip(condition: str) -> str:
    return f"{{% if {condition} %}}{{% continue %}}{{% endif %}}"


_NEXT = "messages[loop.index0 + 1]"
_LAST = "messages[loop.index0 - 1]"
_HAS_TEXT = "m.tool_calls and m.content"
READS_ALL = _template()
STRICT_TEMPLATES: Mapping[str, tuple[str, TemplateRules]] = {
    "no system": (_template(_raise("m.role == 'system'")), TemplateRules(system=False, later_system=False)),
    "system before the last user": (  # Mistral 7B v0.3
        "{% for m in messages %}{% if m.role == 'user' and loop.last and messages[0].role == 'system' %}"
        "{{ messages[0].content }}{% endif %}{% if m.role != 'system' %}<{{ m.role }}>" + _CONTENT + _CALLS + "</end>\n"
        "{% endif %}{% endfor %}" + _END,
        TemplateRules(system=False, later_system=False),
    ),
    "one system, first": (  # Qwen3.8
        _template(_raise("m.role == 'system' and not loop.first")),
        TemplateRules(several_system=False, later_system=False),
    ),
    "drops other systems": (  # Llama 2
        _template(_skip("m.role == 'system' and not loop.first")),
        TemplateRules(several_system=False, later_system=False),
    ),
    "systems first": (
        _template(_raise(f"m.role == 'system' and not loop.first and {_LAST}.role != 'system'")),
        TemplateRules(later_system=False),
    ),
    "needs a user": (  # Qwen3.5
        _template(prologue=_raise("messages | rejectattr('role', 'equalto', 'system') | list | length == 0")),
        TemplateRules(system_alone=False),
    ),
    "no calls": (_template(_skip("m.role == 'tool'"), calls=""), TemplateRules(calls=False)),
    "one call in a message": (  # Llama 3.1
        _template(_raise("m.tool_calls and m.tool_calls | length > 1")),
        TemplateRules(several_calls=False),
    ),
    "text or calls": (  # Llama 3.1
        _template(content="{% if not m.tool_calls %}" + _CONTENT + "{% endif %}"),
        TemplateRules(text_with_calls=False, thought_text_with_calls=False),
    ),
    "text after calls": (
        _template(
            content="{% if not m.tool_calls %}" + _CONTENT + "{% endif %}",
            calls=_CALLS + "{% if m.tool_calls %}" + _CONTENT + "{% endif %}",
        ),
        TemplateRules(text_with_calls=False, thought_text_with_calls=False),
    ),
    "thought or text": (  # gpt-oss
        _template(_raise(f"{_HAS_TEXT} and m.thinking")),
        TemplateRules(thought_text_with_calls=False),
    ),
    "text or calls, and no text before": (
        _template(
            _raise(f"m.tool_calls and not loop.first and {_LAST}.role == 'assistant'"),
            content="{% if not m.tool_calls %}" + _CONTENT + "{% endif %}",
        ),
        TemplateRules(text_with_calls=False, thought_text_with_calls=False, text_before_calls=False),
    ),
    "text beside calls only": (
        _template(_raise(f"m.tool_calls and not loop.first and {_LAST}.role == 'assistant'")),
        TemplateRules(text_before_calls=False),
    ),
    "alternating": (  # Gemma
        _template(
            _raise("m.role == 'assistant' and (loop.first or " + _LAST + ".role == 'system')")
            + _raise(f"not loop.first and m.role in ('user', 'assistant') and {_LAST}.role == m.role")
        ),
        TemplateRules(later_system=False, users=False, answers=False, answer_first=False, text_before_calls=False),
    ),
    "answer after a result": (
        _template(_raise(f"m.role == 'user' and not loop.first and {_LAST}.role == 'tool'")),
        TemplateRules(user_after_result=False),
    ),
    "result after a call": (
        _template(_raise(f"m.tool_calls and not loop.last and {_NEXT}.role != 'tool'")),
        TemplateRules(open_calls=False),
    ),
    "calls with a text": (  # Qwen3 of Unsloth
        _template(content="{{ m.content + '' }}"),
        TemplateRules(null_content=False),
    ),
    "calls with null": (  # DeepSeek V3
        _template(calls="{% if m.content is none %}" + _CALLS + "{% endif %}"),
        TemplateRules(empty_content=False, text_with_calls=False, thought_text_with_calls=False),
    ),
    "short ids": (  # Mistral
        _template("{% for call in m.tool_calls or [] %}" + _raise("call.id | length != 9") + "{% endfor %}"),
        TemplateRules(any_ids=False),
    ),
}
"""Templates, and their rules."""

STRICTEST = (
    _raise("messages | rejectattr('role', 'equalto', 'system') | list | length == 0")
    + "{% set ns = namespace(last='') %}{% for m in messages %}"
    + _raise("m.role == 'system' and not loop.first")
    + _raise("m.role == 'assistant' and ns.last in ('', 'system', 'assistant')")
    + _raise("m.role == 'user' and ns.last in ('user', 'tool')")
    + _raise("m.role == 'tool' and ns.last == 'tool' or m.tool_calls and m.content is not string")
    + _raise(f"m.tool_calls and (m.tool_calls | length > 1 or (not loop.last and {_NEXT}.role != 'tool'))")
    + "{% for call in m.tool_calls or [] %}"
    + _raise("call.id | length != 9")
    + "{% endfor %}{% set ns.last = m.role %}<{{ m.role }}>{% if m.tool_calls %}"
    + _CALLS
    + "{% else %}{{ m.content + '' }}{% endif %}</end>\n{% endfor %}"
    + _END
)
"""A template with all of these rules at once."""

EFFORT_TEMPLATES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "checked": (  # Qwen3.8
        "{% if enable_thinking is not false and reasoning_effort is defined and "
        "reasoning_effort not in ('low', 'medium', 'xhigh') %}{{ raise_exception('unknown') }}{% endif %}" + READS_ALL,
        ("none", "low", "medium", "xhigh"),
    ),
    "a word": ("Reasoning: {{ reasoning_effort or 'medium' }}\n" + READS_ALL, ("low", "medium", "high")),  # gpt-oss
    "known or not": (  # DeepSeek V4
        "{% if reasoning_effort == 'max' %}Think hard.{% endif %}" + READS_ALL,
        ("none", "minimal", "low", "medium", "high", "xhigh", "max"),
    ),
    "none": (READS_ALL, ()),
}
"""Templates, and the efforts that they accept."""
