"""Arguments written as JSON: they are passed on verbatim, however the text is cut."""

import json
from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from proa_gateway.parsing.arguments_reader import JsonReader
from proa_gateway.parsing.call_reader import CallObjectReader
from proa_gateway.parsing.format import CallObject
from proa_gateway.parsing.json_text import JsonScanner

ENVELOPE = CallObject(name="name", arguments="arguments", aliases=("parameters",))
SPACE = st.text(" \n\t\r", max_size=3)


def objects_of(inner: st.SearchStrategy[object]) -> st.SearchStrategy[dict[str, object]]:
    return st.dictionaries(st.text(), inner, max_size=4)


scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text()
values = st.recursive(scalars, lambda inner: st.lists(inner, max_size=4) | objects_of(inner), max_leaves=12)


@st.composite
def json_texts(draw: st.DrawFn, strategy: st.SearchStrategy[object]) -> str:
    """JSON texts of the strategy's values in all ways of writing them."""
    separators = draw(st.sampled_from([None, (",", ":"), (" ,\n", "\t: ")]))
    indent = draw(st.sampled_from([None, 0, 3]))
    return json.dumps(draw(strategy), ensure_ascii=draw(st.booleans()), separators=separators, indent=indent)


def read(reader: JsonReader | CallObjectReader, text: str, cuts: Sequence[int]) -> tuple[str, str]:
    """What the reader writes of the text, cut at these positions, and what is left of it."""
    written = ""
    bounds = sorted({0, len(text), *(cut % (len(text) + 1) for cut in cuts)})
    for start, end in pairwise(bounds):
        written += reader.feed(text[start:end])
        if reader.is_complete:
            return written, reader.rest + text[end:]
    return written + reader.close(by_model=False), ""


@given(json_texts(objects_of(values)), SPACE, st.text(), st.lists(st.integers(0, 1000)))
def test_arguments_are_verbatim_and_the_text_after_them_is_left(
    text: str, space: str, rest: str, cuts: list[int]
) -> None:
    reader = JsonReader()
    assert read(reader, space + text + rest, cuts) == (text, rest)
    assert reader.is_complete


@given(st.text('{}[]",:\\ nameé\n1', max_size=40), st.text('{}[]",:\\ naé\n1', max_size=20))
def test_a_text_passes_if_the_value_goes_on_after_it(before: str, text: str) -> None:
    quick, whole = JsonScanner(), JsonScanner()
    for scanner in (quick, whole):
        scanner.scan("[" + before)
    goes_on = not whole.is_complete and whole.scan(text) == len(text) and not whole.is_complete
    passes = quick.passes(text)
    assert goes_on or not passes
    if not passes:
        quick.scan(text)
    for rest in ('"', "]", "}", '"]'):
        assert (quick.scan(rest), quick.is_complete) == (whole.scan(rest), whole.is_complete)


@given(json_texts(objects_of(values)), st.integers(0, 1000), st.lists(st.integers(0, 1000)))
def test_truncated_arguments_are_what_is_there(text: str, length: int, cuts: list[int]) -> None:
    truncated = text[: length % len(text)]
    reader = JsonReader()
    assert read(reader, truncated, cuts) == (truncated, "")
    assert not reader.is_complete


@pytest.mark.parametrize("text", ["null", "[1]", '"a"', "x"])
def test_what_is_no_object_is_text(text: str) -> None:
    assert read(JsonReader(), text, []) == ("", text)


@given(
    name=st.text(st.characters(exclude_categories=["Cs"])),
    arguments=json_texts(values),
    others=st.dictionaries(
        st.text().filter(lambda key: key not in ("name", "arguments", "parameters")), values, max_size=3
    ),
    order=st.randoms(use_true_random=False),
    key=st.sampled_from(["arguments", "parameters"]),
    space=SPACE,
    cuts=st.lists(st.integers(0, 1000)),
)
def test_envelope_has_its_keys_in_any_order(
    name: str, arguments: str, others: dict[str, object], order: Random, key: str, space: str, cuts: list[int]
) -> None:
    fields = [
        ("name", json.dumps(name)),
        (key, arguments),
        *((other, json.dumps(value)) for other, value in others.items()),
    ]
    order.shuffle(fields)
    text = ",".join(f"{space}{json.dumps(field)}{space}:{space}{value}{space}" for field, value in fields)
    for needs_arguments in (False, True):
        reader = CallObjectReader(ENVELOPE, needs_arguments=needs_arguments)
        assert read(reader, f"{space}{{{text}}} rest", cuts) == (arguments, " rest")
        assert reader.name == name


@given(st.text('{}[]",:\\ name\nxu0', max_size=40), st.lists(st.integers(0, 1000)))
def test_broken_envelopes_are_read_alike_however_they_are_cut(text: str, cuts: list[int]) -> None:
    text = '{"name": "f", "arguments": ' + text
    cut, whole = (CallObjectReader(ENVELOPE, needs_arguments=False) for _ in range(2))
    assert read(cut, text, cuts) == read(whole, text, [])
    assert (cut.name, cut.is_complete) == (whole.name, whole.is_complete)


def test_name_is_known_before_the_arguments_unless_they_are_needed() -> None:
    early, late = (CallObjectReader(ENVELOPE, needs_arguments=needs) for needs in (False, True))
    for reader in (early, late):
        reader.feed('{"name": "f"')
    assert (early.name, late.name) == ("f", None)
    assert [reader.feed(', "arguments": {"a"') for reader in (early, late)] == ['{"a"', '{"a"']
    assert late.name == "f"


def test_a_long_string_passes_in_the_pieces_in_which_it_comes() -> None:
    reader = CallObjectReader(ENVELOPE, needs_arguments=False)
    reader.feed('{"name": "f", "arguments": {"a": "')
    pieces = ["</tool_call> {[", "é" * 1000, "}]:, "] * 100
    assert [reader.feed(piece) for piece in pieces] == pieces
    assert reader.feed('"}}') == '"}'
    assert reader.is_complete
