import json
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from proa_gateway.parsing.arguments_reader import ArgumentsReader
from proa_gateway.parsing.format import Tagged
from proa_gateway.parsing.literal_reader import LiteralReader, LiteralSyntax
from proa_gateway.parsing.tagged_reader import TaggedReader, Tags

XML = Tags.of(Tagged("<parameter=$key>\n$value\n</parameter>\n"))
PAIRS = Tags.of(Tagged("<arg_key>$key</arg_key>\n<arg_value>$value</arg_value>\n"))
QUOTED = Tags.of(Tagged('<parameter name="$key">$value</parameter>\n'))
TYPED = Tags.of(Tagged('<parameter name="$key" string="$is_string">$value</parameter>\n'))
OF_TYPE = Tags.of(Tagged('<p key="$key" type="$type">$value</p>'))
NAMED = Tags.of(Tagged("<$key>$value</$key>"))
CDATA = Tags.of(Tagged('<p key="$key">$value</p>', quotes=("<![CDATA[", "]]>")))
PYTHON = LiteralSyntax(separator="=")
OBJECT = LiteralSyntax(raw_quote='<|"|>')

PARAMETERS = {
    "properties": {
        "city": {"type": "string"},
        "note": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "days": {"type": "integer"},
        "ratio": {"$ref": "#/$defs/ratio"},
        "is_cold": {"type": "boolean"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "either": {"type": ["string", "integer"]},
    },
    "$defs": {"ratio": {"type": "number"}},
}


def tagged(tags: Tags = XML) -> ArgumentsReader:
    return TaggedReader(tags, PARAMETERS)


def read(reader: ArgumentsReader, parts: Sequence[str], *, by_model: bool = True) -> str:
    """Feed the parts until the arguments are complete; what is left is `rest`."""
    written = "".join(map(reader.feed, parts))
    return written + ("" if reader.is_complete else reader.close(by_model=by_model))


def read_all_ways(make: Callable[[], ArgumentsReader], text: str) -> str:
    """Read the text in parts of 1, 2, 3, 7 and all characters, which must make no difference."""
    results = set()
    for size in (1, 2, 3, 7, len(text)):
        reader = make()
        results.add((read(reader, [text[i : i + size] for i in range(0, len(text), size)]), reader.rest))
    assert len(results) == 1, results
    return results.pop()[0]


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("</function>", {}),
        ("<parameter=city>\nOslo\n</parameter>\n</function>", {"city": "Oslo"}),
        ("\n<parameter=city>Oslo</parameter></function>", {"city": "Oslo"}),
        ("<parameter=city>\n\n</parameter>\n</function>", {"city": ""}),
        ("<parameter=city>\n</parameter>\n</function>", {"city": ""}),
        ('<parameter=city>\n\n a "b"\\\n\n</parameter>\n</function>', {"city": '\n a "b"\\\n'}),
        ("<parameter=city>\n</param> </parameter</parameter>\n</function>", {"city": "</param> </parameter"}),
        ("<parameter=city>\n42\n</parameter>\n<parameter=days>\n42\n</parameter>\n</f", {"city": "42", "days": 42}),
        ("<parameter=city>\nnull\n</parameter>\n</function>", {"city": "null"}),
        ("<parameter=note>\nnull\n</parameter>\n</function>", {"note": None}),
        ("<parameter=note>\nnullable\n</parameter>\n</function>", {"note": "nullable"}),
        ("<parameter=note>\n42\n</parameter>\n</function>", {"note": "42"}),
        ("<parameter=ratio>\n1e-3\n</parameter>\n</function>", {"ratio": 1e-3}),
        ("<parameter=ratio>\n2\n</parameter>\n</function>", {"ratio": 2}),
        ("<parameter=ratio>\nNaN\n</parameter>\n</function>", {"ratio": "NaN"}),
        ("<parameter=is_cold>\nTrue\n</parameter>\n</function>", {"is_cold": True}),
        ('<parameter=tags>\n["a", "b"]\n</parameter>\n</function>', {"tags": ["a", "b"]}),
        ("<parameter=tags>\n['a', \"it's\"]\n</parameter>\n</function>", {"tags": ["a", "it's"]}),
        ("<parameter=tags>\n[a\n</parameter>\n</function>", {"tags": "[a"}),
        ("<parameter=either>\n5\n</parameter>\n</function>", {"either": 5}),
        ("<parameter=either>\ntrue\n</parameter>\n</function>", {"either": "true"}),
        ('<parameter=other>\n{"a": [1]}\n</parameter>\n</function>', {"other": {"a": [1]}}),
        ("<parameter=other>\nsome text\n</parameter>\n</function>", {"other": "some text"}),
        ('<parameter=tags>\n["</parameter>", "\\""]\n</parameter>\n</f', {"tags": ["</parameter>", '"']}),
        ('<parameter=tags>\n["a</parameter>\n<parameter=days>\n2\n</parameter>\n</f', {"tags": '["a', "days": 2}),
        ('<parameter=a"b>\n1\n</parameter>\n</function>', {'a"b': 1}),
    ],
)
def test_tagged_arguments_have_the_types_of_the_schema(text: str, arguments: object) -> None:
    assert json.loads(read_all_ways(tagged, text)) == arguments


@pytest.mark.parametrize(
    ("tags", "text"),
    [
        (
            PAIRS,
            "\n<arg_key>city</arg_key>\n<arg_value>Oslo</arg_value>\n<arg_key>days</arg_key><arg_value>2</arg_value>",
        ),
        (PAIRS, "<arg_key>city</arg_key><arg_value>Oslo</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>"),
        (QUOTED, '<parameter name="city">Oslo</parameter>\n<parameter name="days">2</parameter>\n</invoke>'),
        (
            TYPED,
            '<parameter name="city" string="true">Oslo</parameter><parameter name="days" string="false">2</parameter>',
        ),
        (OF_TYPE, '<p key="city" type="string">Oslo</p><p key="days" type="number">2</p></call>'),
        (NAMED, "<city>Oslo</city><days>2</days></call>"),
        (CDATA, '<p key="city">Oslo</p><p key="days">2</p></call>'),
        (CDATA, '<p key="city"><![CDATA[Oslo]]></p><p key="days"><![CDATA[2]]></p></call>'),
    ],
)
def test_each_form_of_tags_gives_the_same_arguments(tags: Tags, text: str) -> None:
    assert json.loads(read_all_ways(lambda: tagged(tags), text)) == {"city": "Oslo", "days": 2}


@pytest.mark.parametrize("value", ["", "</p>", "<![CDATA[", "a < b && c]] >", "]]>", "]]></q>"])
def test_a_quoted_value_is_what_stands_between_the_quotes(value: str) -> None:
    text = f'<p key="city"><![CDATA[{value}]]></p></call>'
    assert json.loads(read_all_ways(lambda: tagged(CDATA), text)) == {"city": value}


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("<tags><item>a</item><item>null</item></tags></call>", {"tags": ["a", "null"]}),
        ("<tags></tags></call>", {"tags": []}),
        ("<tags>[1]</tags></call>", {"tags": [1]}),
        ("<other><a><item>1</item><item>b</item></a><c>null</c></other></call>", {"other": {"a": [1, "b"], "c": None}}),
        ("<other><a>1</other></call>", {"other": "<a>1"}),
        ("<other>a</b></other></call>", {"other": "a</b>"}),
        ("<city><b>x</b></city></call>", {"city": "<b>x</b>"}),
    ],
)
def test_values_of_tags_that_are_named_by_keys_may_have_such_tags(text: str, arguments: object) -> None:
    assert json.loads(read_all_ways(lambda: tagged(NAMED), text)) == arguments


@pytest.mark.parametrize(("type_", "either"), [("string", "5"), ("number", 5), ("integer", 5), ("other", 5)])
def test_the_type_that_the_model_writes_counts_before_the_schema(type_: str, either: object) -> None:
    text = f'<p key="either" type="{type_}">5</p></call>'
    assert json.loads(read_all_ways(lambda: tagged(OF_TYPE), text)) == {"either": either}


def test_a_value_that_is_no_json_ends_at_its_first_tag_when_the_call_is_closed() -> None:
    text = '<arg_key>tags</arg_key><arg_value>["a</arg_value><arg_key>days</arg_key><arg_value>2</arg_value>'
    assert json.loads(read_all_ways(lambda: tagged(PAIRS), text)) == {"tags": '["a', "days": 2}


def test_a_declared_string_is_a_string_whatever_the_schema_has() -> None:
    text = '<parameter name="x" string="true">5</parameter><parameter name="city" string="false">5</parameter>'
    assert json.loads(read_all_ways(lambda: tagged(TYPED), text)) == {"x": "5", "city": 5}


def test_a_string_is_sent_as_it_comes() -> None:
    reader = tagged()
    assert reader.feed("<parameter=city>\nThe quick") == '{"city": "The quick'
    assert reader.feed(' "fox"\n</parameter') == ' \\"fox\\"'
    assert reader.feed("s>\n</parameter>\n") == '\\n</parameters>"'
    assert not reader.is_complete
    assert reader.feed("</function>") == "}"
    assert reader.is_complete
    assert reader.rest == "</function>"


def test_arguments_that_are_truncated_between_two_give_no_valid_json() -> None:
    text = "<parameter=city>\nOslo\n</parameter>\n"
    assert read(tagged(), [text], by_model=True) == '{"city": "Oslo"}'
    for rest in ("", "<para"):
        assert read(tagged(), [text, rest], by_model=False) == '{"city": "Oslo"'
    assert read(tagged(), [""], by_model=False) == ""


def test_a_truncated_value_gives_no_valid_json() -> None:
    for text in ("<parameter=city>\nOs", "<parameter=days>\n1", "<parameter=note>\nnul"):
        with pytest.raises(ValueError, match=r"."):
            json.loads(read_all_ways(tagged, text))


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        (")", {}),
        ("city='Oslo', days=3)", {"city": "Oslo", "days": 3}),
        ("a=True, b=None, c=-1.5e3, d=false)", {"a": True, "b": None, "c": -1500.0, "d": False}),
        ("a=[1, (2, 3), {'k': {'l': []}}], b={})", {"a": [1, [2, 3], {"k": {"l": []}}], "b": {}}),
        ('a=\'it\\\'s\', b="say \\"hi\\"")', {"a": "it's", "b": 'say "hi"'}),
        (r"a='\n\t\\ \x41 \u00e9 \U0001F600 \d \ud83d\ude00')", {"a": "\n\t\\ A é 😀 \\d 😀"}),
        ("a = 'b' , c = [ 1 , ] , )", {"a": "b", "c": [1]}),
        ("a={1: 'x', True: 2})", {"a": {"1": "x", "True": 2}}),
        ("a='),(]}')", {"a": "),(]}"}),
        ("a=some words)", {"a": "some words"}),
    ],
)
def test_arguments_of_a_python_call_are_read(text: str, arguments: object) -> None:
    assert json.loads(read_all_ways(lambda: LiteralReader(PYTHON), text)) == arguments


def test_a_python_call_leaves_what_follows_its_arguments() -> None:
    reader = LiteralReader(PYTHON)
    assert json.loads(reader.feed("a=1), g(b=2)]")) == {"a": 1}
    assert reader.rest == "), g(b=2)]"


@pytest.mark.parametrize(
    ("text", "arguments"),
    [
        ("}", {}),
        ('city:<|"|>Oslo<|"|>,days:3}', {"city": "Oslo", "days": 3}),
        ('a:<|"|>{x:"<|"}\n\\n<|"|>}', {"a": '{x:"<|"}\n\\n'}),
        ('a:<|"|><|"|>,b:[<|"|>x<|"|>,true,null,{c:-1}]}', {"a": "", "b": ["x", True, None, {"c": -1}]}),
        ('"a" : "x\\ny", b: bare word}', {"a": "x\ny", "b": "bare word"}),
    ],
)
def test_object_literals_are_read(text: str, arguments: object) -> None:
    assert json.loads(read_all_ways(lambda: LiteralReader(OBJECT), text)) == arguments


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=10,
)
KEYS = st.from_regex(r"\A[A-Za-z_][A-Za-z0-9_]{0,10}\Z")


def cut(text: str, cuts: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(place % (len(text) + 1) for place in cuts)})
    return [text[start:end] for start, end in pairwise(places)]


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(st.integers(min_value=0), max_size=10))
def test_python_calls_give_their_values_at_any_cuts(arguments: dict[str, object], cuts: list[int]) -> None:
    text = ", ".join(f"{key}={value!r}" for key, value in arguments.items()) + ")"
    assert json.loads(read(LiteralReader(PYTHON), cut(text, cuts))) == arguments


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(st.integers(min_value=0), max_size=10))
def test_object_literals_give_their_values_at_any_cuts(arguments: dict[str, object], cuts: list[int]) -> None:
    text = ",".join(f"{key}:{object_literal(value)}" for key, value in arguments.items()) + "}"
    assert json.loads(read(LiteralReader(OBJECT), cut(text, cuts))) == arguments


def object_literal(value: object) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, list):
        return f"[{','.join(map(object_literal, value))}]"
    if isinstance(value, dict):
        return f"{{{','.join(f'{json.dumps(key)}:{object_literal(item)}' for key, item in value.items())}}}"
    return json.dumps(value)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(KEYS, VALUES, max_size=4), st.lists(st.integers(min_value=0), max_size=10))
def test_tagged_arguments_give_their_values_at_any_cuts(arguments: dict[str, object], cuts: list[int]) -> None:
    types = {key: {"type": "string"} if isinstance(value, str) else {} for key, value in arguments.items()}
    values = {key: value if isinstance(value, str) else json.dumps(value) for key, value in arguments.items()}
    text = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items()) + "</function>"
    assert json.loads(read(TaggedReader(XML, {"properties": types}), cut(text, cuts))) == arguments


@settings(max_examples=300, deadline=None)
@given(st.text(alphabet="ab1 ,:=()[]{}\"'\\<|>\nux"), st.lists(st.integers(min_value=0), max_size=5))
def test_malformed_arguments_never_fail_and_cuts_make_no_difference(text: str, cuts: list[int]) -> None:
    makers: list[Callable[[], ArgumentsReader]] = [
        tagged,
        lambda: LiteralReader(PYTHON),
        lambda: LiteralReader(OBJECT),
    ]
    for make in makers:
        assert read(make(), cut(text, cuts)) == read(make(), cut(text, []))
