"""Chat templates that would take minutes or gigabytes: rendering them ends within a budget, wherever their cost is."""

import json

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from proa.chat_template import MAX_SOURCE, ChatTemplate, ChatTemplateError, ChatTemplateTooCostly
from proa.template_budget import Budget
from proa.template_sandbox import TemplateEnvironment

MESSAGES = [{"role": "user", "content": "Hello, what is this?"}]
BIG = "{% set ns = namespace(x='0123456789' * 100000) %}"
SHARED = "{% set ns = namespace(x=[1, 2]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
DOUBLING = "{% set ns = namespace(x='abc') %}{% for i in range(99) %}{% set ns.x = EXPRESSION %}{% endfor %}{{ ns.x }}"

LOOPS = {
    "two nested loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "a loop in a filter": "{% for i in range(99999) %}{{ range(99999) | sum }}{% endfor %}",
    "a loop with a condition": "{% for i in range(99999) if range(99999) | sum == 1 %}{% endfor %}",
    "a recursive loop": "{% for i in range(99999) recursive %}"
    "{% if loop.depth < 9 %}{{ loop(range(99999)) }}{% endif %}{% endfor %}",
    "loop.length": "{% for i in range(99999) | select('odd') %}{{ loop.length }}{{ range(99999) | list }}{% endfor %}",
    "two recursions": "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "a comparison with a large text, many times": BIG
    + "{% for i in range(99999) %}"
    + "{% if 'x' in ns.x %}{% endif %}" * 300
    + "{% endfor %}",
    "a test in a filter": BIG
    + "{% for i in range(999) %}{{ ([ns.x] * 9) | select('upper') | list | length }}{% endfor %}",
    "a list in a filter": "{% for i in range(99999) %}{{ range(99999) | map('string') | list | length }}{% endfor %}",
}
VALUES = {
    "a formatted number": "{{ '%1000000000d' % 1 }}",
    "a formatted number of a variable width": "{{ '%*d' % (1000000000, 1) }}",
    "a formatted fraction": "{{ '%.1000000000f' % 1.5 }}",
    "a name with a parenthesis": "{{ '%(a(b))1000000000d' % {'a(b)': 1} }}",
    "the filter format": "{{ '%1000000000d' | format(1) }}",
    "formatted bytes": "{{ 'x%1000000000d'.encode() % 1 }}",
    "one value many times": BIG + "{{ ('%(a)s' * 10000) % {'a': ns.x} }}",
    "str.format": "{{ '{:>1000000000}'.format('x') }}",
    "str.format with a width as a value": "{{ '{:>{w}}'.format('x', w=1000000000) }}",
    "str.format_map": "{{ '{a:>1000000000}'.format_map({'a': 'x'}) }}",
    "str.format of one value many times": BIG + "{{ ('{0}' * 10000).format(ns.x) }}",
    "a power": "{{ 10**10000000 }}",
    "a constant power in a condition": "{% if 10**100000000 %}{% endif %}",
    "products": "{% set ns = namespace(x=3) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a repeated text": "{{ 'x' * 10000000000 }}",
    "a repeated text, the other way": "{{ 10000000000 * 'x' }}",
    "a repeated list": "{{ ([0] * 1000000000) | length }}",
    "a repeated tuple of a text": BIG + "{{ ((ns.x,) * 100000) | join }}",
    "center": "{{ 'x' | center(1000000000) }}",
    "str.center": "{{ 'x'.center(1000000000) }}",
    "str.ljust": "{{ 'x'.ljust(1000000000) }}",
    "str.rjust": "{{ 'x'.rjust(1000000000) }}",
    "str.zfill": "{{ 'x'.zfill(1000000000) }}",
    "str.center of markup": "{{ ('x' | safe).center(1000000000) }}",
    "str.expandtabs": "{{ '\\t'.expandtabs(1000000000) }}",
    "bytes.center": "{{ 'x'.encode().center(1000000000) }}",
    "indent": "{{ 'a\\nb' | indent(1000000000) }}",
    "indent with a text": BIG + "{{ ('a\\n' * 100000) | indent(ns.x) }}",
    "wordwrap": "{{ ('x' * 1000000) | wordwrap(1) }}",
    "tojson": "{{ messages | tojson(indent=1000000000) }}",
    "tojson with a separator": BIG + "{{ ([0] * 10000) | tojson(separators=(ns.x, ns.x)) }}",
    "replace": BIG + "{{ ns.x | replace('0', ns.x) }}",
    "replace of nothing": BIG + "{{ ns.x | replace('', ns.x) }}",
    "str.replace": BIG + "{{ ns.x.replace('0', ns.x) }}",
    "join": BIG + "{{ range(99999) | join(ns.x) }}",
    "str.join": BIG + "{{ ns.x.join('0' * 100000) }}",
    "str.join of a generator": BIG + "{{ ''.join(range(99999) | map('replace', '1', ns.x)) }}",
    "str.translate": BIG + "{{ ns.x.translate({48: ns.x}) }}",
    "a default many times": BIG + "{{ [''] * 99999 | map('default', ns.x, true) | list | length }}",
    "a default of an attribute many times": BIG
    + "{{ range(99999) | map(attribute='y', default=ns.x) | list | tojson }}",
    "keys that are copied": BIG + "{{ range(99999) | groupby('y', default=ns.x) | list | length }}",
    "sorted texts": BIG + "{{ range(99999) | map('replace', '1', ns.x) | sort | length }}",
    "lists that are added up": "{{ ([[0] * 100] * 10000) | sum(start=[]) | length }}",
    "batch": "{{ [1] | batch(1000000000, 0) | list | length }}",
    "slice": "{{ [1] | slice(1000000000) | list | length }}",
    "round": "{{ 1.5 | round(1000000000, 'ceil') }}",
    "a number of a long text": "{{ ('f' * 1000000) | int(0, 16) }}",
    "bytes of a number": "{{ (1).to_bytes(1000000000, 'big') | length }}",
    "dict.fromkeys": BIG + "{{ dict.fromkeys(range(99999), ns.x) | tojson }}",
    "a list that doubles": DOUBLING.replace("EXPRESSION", "ns.x + ns.x"),
    "a concatenation that doubles": DOUBLING.replace("EXPRESSION", "ns.x ~ ns.x"),
    "join that doubles": DOUBLING.replace("EXPRESSION", "[ns.x, ns.x] | join"),
    "lists in lists as text": SHARED + "{{ ns.x }}",
    "lists in lists as JSON": SHARED + "{{ ns.x | tojson }}",
    "lists in lists compared": SHARED + "{% set ns.y = ns.x %}" + "{{ ns.x == [ns.x[0], ns.x[1]] }}",
    "tuples in tuples as a key": SHARED.replace("[ns.x, ns.x]", "(ns.x, ns.x)").replace("[1, 2]", "(1, 2)")
    + "{{ {ns.x: 1} | length }}",
    "dicts in dicts": SHARED.replace("[ns.x, ns.x]", "dict(a=ns.x, b=ns.x)") + "{{ ns.x }}",
    "lists in namespaces in lists": SHARED.replace("[ns.x, ns.x]", "[ns.x, ns.x, ns]") + "{{ ns }}",
    "a block's text": BIG + "{% set y %}{% for i in range(99999) %}{{ ns.x }}{% endfor %}{% endset %}",
    "a macro's text": BIG + "{% macro f() %}{% for i in range(99999) %}{{ ns.x }}{% endfor %}{% endmacro %}{{ f() }}",
    "a prompt": BIG + "{% for i in range(99999) %}{{ ns.x }}{% endfor %}",
    "a prompt without a loop": BIG + "{{ ns.x }}" * 5000,
    "many texts": BIG + "".join(f"{{% set y{i} = ns.x[1:] %}}" for i in range(2000)),
    "many lists of texts": BIG + "{% for i in range(9999) %}{% set ns.y = (ns.y or []) + [ns.x[1:]] %}{% endfor %}",
    "random text": "{{ lipsum(n=1000000000) }}",
    "the layout of a date": BIG + "{{ strftime_now(ns.x) }}",
    "an error": BIG + "{{ raise_exception(ns.x) }}",
}


COMPILED = {
    "a long source": "x" * (MAX_SOURCE + 1),
    "many parts": "{{ [" + "1," * 12_000 + "] }}",
    "parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "a long sum": "{{ " + "1 + " * 3000 + "1 }}",
    "loops in loops": "{% for i in [] %}" * 300 + "{% endfor %}" * 300,
    "conditions": "{% if a %}" + "{% elif b %}" * 3000 + "{% endif %}",
    "a long number": "{{ 0x" + "f" * 3000 + " }}",
    "what is no template": "{% if %}",
    "break outside a loop": "{% break %}",
}

# Methods of the values of templates that make nothing larger than what they are given.
LINEAR = """
    as_integer_ratio bit_count bit_length capitalize casefold close conjugate copy count decode denominator encode
    endswith find fromhex get gi_running gi_suspended gi_yieldfrom hex imag index is_integer isalnum isalpha isascii
    isdecimal isdigit isdisjoint isidentifier islower isnumeric isprintable isspace istitle isupper items keys lower
    lstrip maketrans mapping numerator partition real removeprefix removesuffix rfind rindex rpartition rsplit rstrip
    send split splitlines start startswith step stop strip swapcase throw title upper values
"""
BOUNDED = "center expandtabs format format_map from_bytes fromkeys join ljust replace rjust to_bytes translate zfill"


@pytest.mark.parametrize("source", LOOPS.values(), ids=LOOPS)
def test_a_template_that_takes_too_long_is_stopped(source: str) -> None:
    with pytest.raises(ChatTemplateTooCostly, match=r"more than 0\.05 s of CPU time"):
        ChatTemplate(source).render(MESSAGES, budget=Budget(0.05))


@pytest.mark.parametrize("source", VALUES.values(), ids=VALUES)
def test_a_template_that_makes_too_much_is_stopped_before_it_has_it(source: str) -> None:
    with pytest.raises(ChatTemplateError) as caught:
        ChatTemplate(source).render(MESSAGES)
    assert 0 < len(str(caught.value)) <= 1000


@pytest.mark.parametrize("source", COMPILED.values(), ids=COMPILED)
def test_a_template_that_is_too_costly_to_compile_is_refused(source: str) -> None:
    with pytest.raises(ChatTemplateError, match="chat template"):
        ChatTemplate(source)


def test_a_long_chain_of_filters_compiles() -> None:
    assert ChatTemplate("{{ '<'" + "|e" * 50 + " }}").render([]) == "&lt;"


def test_a_budget_is_shared_by_renderings() -> None:
    template, budget = ChatTemplate("{{ 'x' * 100000 }}"), Budget(size=250_000)
    assert len(template.render([], budget=budget)) == 100_000
    with pytest.raises(ChatTemplateTooCostly):
        template.render([], budget=budget)


def test_an_inline_rendering_is_stopped_where_one_on_a_thread_goes_on() -> None:
    template = ChatTemplate("{% for i in range(2000) %}{{ 'x' * 100 }}{% endfor %}")
    with pytest.raises(ChatTemplateTooCostly):
        template.render([], budget=Budget(0.0, is_inline=True))
    assert len(template.render([])) == 200_000


def test_every_method_of_a_templates_values_is_known_to_be_linear_or_is_bounded() -> None:
    values: list[object] = ["", b"", 1, 1.5, True, [], (), {}, None, range(1), {}.items(), (each for each in [1])]
    environment = TemplateEnvironment([], {})
    methods = {
        name
        for value in values
        for name in dir(value)
        if environment.is_safe_attribute(value, name, getattr(value, name))
    }
    assert methods - {*LINEAR.split()} == {*BOUNDED.split()}


def test_what_templates_do_works_within_the_bounds() -> None:
    source = """
    {{ '%s-%5d|%.2f' % ('a', 7, 1.25) }} {{ '{:>4}|{b}'.format('x', b=2) }} {{ 2 ** 10 }} {{ 'ab' * 2 }} {{ 7 % 4 }}
    {{ [1, 2] | join(', ') }} {{ 'a,b'.split(',') | join(';') }} {{ '; '.join(['x', 'y']) }}
    {{ 'aXa' | replace('a', 'bb') }} {{ 'aXa'.replace('a', 'bb', 1) }} {{ 'x' | center(5) }}| {{ 'a\nb' | indent(2) }}
    {{ {'a': [1]} | tojson(indent=1) }} {{ [{'n': 2}, {'n': 1}] | sort(attribute='n') | map(attribute='n') | join }}
    {{ [1, 2, 3] | batch(2) | list }} {{ [[1], [2]] | sum(start=0, attribute=0) }} {{ ' x ' | trim }}
    {{ 'a b' | title }} {{ 1.256 | round(1) }} {{ '\t'.expandtabs(4) }}| {{ 'ab'.translate({97: 'x'}) }}
    {{ 'ff' | int(0, 16) }}
    """
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    plain.filters["tojson"] = lambda value, indent: json.dumps(value, indent=indent)
    assert ChatTemplate(source).render([]) == plain.from_string(source).render()
