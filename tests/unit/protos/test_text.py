"""Incremental detokenization: independent of the division into calls, UTF-8 safe, without stop strings."""

from collections.abc import Sequence
from functools import cache

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from proa.text import Detokenizer, TextDelta, TextStream, Vocabulary
from support.tokenizers import byte_level_tokenizer, metaspace_tokenizer

TOKENIZERS = {
    "byte-level": byte_level_tokenizer,
    "metaspace": metaspace_tokenizer,
    "metaspace, no strip": lambda: metaspace_tokenizer(strip=False),
}
family = pytest.mark.parametrize("name", TOKENIZERS)


@cache
def tokenizer_of(name: str) -> Tokenizer:
    return TOKENIZERS[name]()


@cache
def vocabulary_of(name: str) -> Vocabulary:
    return Vocabulary(tokenizer_of(name))


@cache
def letters() -> Vocabulary:
    """Token i is the i-th of these characters; token 26 is the first byte of é, 27 the second, 28 an a before the
    first."""
    alphabet = {chr(ord("a") + i): i for i in range(26)} | {"Ã": 26, "©": 27, "aÃ": 28}
    tokenizer = Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    return Vocabulary(tokenizer)


def ids_of(text: str) -> list[int]:
    return [i for char in text for i in ([26, 27] if char == "é" else [ord(char) - ord("a")])]


def run(stream: TextStream, token_ids: Sequence[int], sizes: Sequence[int] = ()) -> list[TextDelta]:
    """Push the ids in chunks of these sizes, the rest one by one, and finish."""
    deltas, start = [], 0
    for size in [*sizes, *[1] * len(token_ids)]:
        deltas.append(stream.push(token_ids[start : start + size]))
        start += size
        if deltas[-1].stop_string is not None:
            return deltas
    return [*deltas, stream.finish()]


def total(deltas: Sequence[TextDelta]) -> TextDelta:
    return TextDelta("".join(d.text for d in deltas), sum(d.num_tokens for d in deltas), deltas[-1].stop_string)


def lossy(text: str) -> str:
    """For invalid bytes, `decode` with byte fallback has one U+FFFD a byte, a stream one a character."""
    while "\ufffd\ufffd" in text:
        text = text.replace("\ufffd\ufffd", "\ufffd")
    return text


@family
@given(text=st.text(alphabet="abcdefgh Tqé€😀👩‍\n", max_size=40))
@example(text="👩‍👩‍👧 naïve 😀")
@example(text="  two spaces")
def test_streamed_text_equals_decoded_text(name: str, text: str) -> None:
    token_ids = tokenizer_of(name).encode(text).ids
    streamed = total(run(TextStream(vocabulary_of(name)), token_ids)).text
    assert streamed == tokenizer_of(name).decode(token_ids, skip_special_tokens=True)


@given(token_ids=st.lists(st.integers(0, 380), max_size=30), skip=st.booleans())
def test_any_byte_level_ids_stream_to_their_decoded_text(token_ids: list[int], skip: bool) -> None:
    stream = TextStream(vocabulary_of("byte-level"), skip_special_tokens=skip)
    expected = tokenizer_of("byte-level").decode(token_ids, skip_special_tokens=skip)
    assert total(run(stream, token_ids)).text == expected


@family
@given(data=st.data(), skip=st.booleans(), num_context=st.integers(0, 3))
def test_a_token_pushed_alone_adds_the_same_text_as_in_a_sequence(
    name: str, data: st.DataObject, skip: bool, num_context: int
) -> None:
    token_ids = data.draw(st.lists(st.integers(0, tokenizer_of(name).get_vocab_size() + 1), max_size=30))
    context, output = token_ids[:num_context], token_ids[num_context:]
    alone, together = (Detokenizer(vocabulary_of(name), skip_special_tokens=skip, context=context) for _ in range(2))
    pieces = [alone.push_token(token_id) for token_id in output]
    assert "".join(pieces) + alone.finish() == together.push(output) + together.finish()


@family
@given(data=st.data(), skip=st.booleans())
def test_division_into_calls_never_changes_text(name: str, data: st.DataObject, skip: bool) -> None:
    token_ids = data.draw(st.lists(st.integers(0, 399), max_size=20))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=8))
    one_by_one = run(TextStream(vocabulary_of(name), skip_special_tokens=skip), token_ids)
    divided = run(TextStream(vocabulary_of(name), skip_special_tokens=skip), token_ids, sizes)
    assert total(divided) == total(one_by_one)
    assert total(divided).num_tokens == len(token_ids)


@given(data=st.data(), include=st.booleans(), min_tokens=st.integers(0, 6))
def test_stop_string_cuts_at_its_first_completion_however_tokens_arrive(
    data: st.DataObject, include: bool, min_tokens: int
) -> None:
    text = data.draw(st.text(alphabet="abé", max_size=24))
    stop = data.draw(st.lists(st.text(alphabet="abé", min_size=1, max_size=4), min_size=1, max_size=3))
    sizes = data.draw(st.lists(st.integers(0, 5), max_size=8))
    stream = TextStream(letters(), stop=stop, include_stop_str_in_output=include, min_tokens=min_tokens)
    deltas = run(stream, ids_of(text), sizes)
    assert total(deltas) == expected_cut(text, stop, include, min_tokens)


def expected_cut(text: str, stop: Sequence[str], include: bool, min_tokens: int) -> TextDelta:
    """The expected result, by brute force: try every end of the text in turn."""
    searched_from = Detokenizer(letters()).push(ids_of(text)[:min_tokens])
    for end in range(len(searched_from), len(text) + 1):
        for string in sorted(stop, key=len, reverse=True):
            if text[len(searched_from) : end].endswith(string):
                kept = text[: end if include else end - len(string)]
                return TextDelta(kept, max(len(ids_of(kept)), min_tokens), string)
    return TextDelta(text, len(ids_of(text)), None)


@given(text=st.text(alphabet="abé", max_size=24), stop=st.text(alphabet="abé", min_size=1, max_size=4))
def test_only_possible_beginnings_of_a_stop_string_are_held_back(text: str, stop: str) -> None:
    stream, released = TextStream(letters(), stop=[stop]), ""
    for length in range(1, len(text) + 1):
        delta = total([stream.push([token_id]) for token_id in ids_of(text[length - 1])])
        released += delta.text
        if delta.stop_string is not None:
            return
        held = text[len(released) : length]
        assert stop.startswith(held)
        assert not any(stop.startswith(text[start:length]) for start in range(len(released)))


@pytest.mark.parametrize(
    ("stop", "tokens", "deltas"),
    [
        ([], [0, 1, 26, 27, 2], "a/1 b/1 /1 é/1 c/1 /0"),
        ([], [0, 26], "a/1 /1 \ufffd/0"),
        (["bcd"], ids_of("abcx"), "a/1 /0 /0 bcx/3 /0"),
        (["bcd"], ids_of("abcd"), "a/1 /0 /0 /0, stopped by bcd"),
        (["bcd"], ids_of("abc"), "a/1 /0 /0 bc/2"),
        (["c", "bc"], ids_of("abc"), "a/1 /0 /0, stopped by bc"),
        (["éb"], ids_of("aéb"), "a/1 /0 /0 /0, stopped by éb"),
    ],
)
def test_published_vectors_hold(stop: list[str], tokens: list[int], deltas: str) -> None:
    got = run(TextStream(letters(), stop=stop), tokens)
    text = " ".join(f"{delta.text}/{delta.num_tokens}" for delta in got)
    assert text + (f", stopped by {got[-1].stop_string}" if got[-1].stop_string else "") == deltas


@pytest.mark.parametrize("min_tokens", [0, 1, 2])
@pytest.mark.parametrize("stop", ["zz", "ax", "\ufffdx", "a\ufffdx"])
def test_an_incomplete_character_behind_whole_ones_in_a_token_is_released(stop: str, min_tokens: int) -> None:
    at_end = run(TextStream(letters(), stop=[stop], min_tokens=min_tokens), [1, 28])
    assert total(at_end) == TextDelta("ba\ufffd", 2)
    stream = TextStream(letters(), stop=[stop], min_tokens=min_tokens)
    assert total([stream.push([28]), stream.boundary()]) == TextDelta("a\ufffd", 1)
    assert total([stream.push([28]), stream.push([27]), stream.finish()]) == TextDelta("aé", 2)
    assert TextStream(letters(), stop=[stop], context=[26]).finish([0], stop_token=True) == TextDelta("\ufffd", 1)


def test_a_stop_string_that_ends_with_an_incomplete_character_cuts_its_token() -> None:
    assert total(run(TextStream(letters(), stop=["\ufffd"]), [28])) == TextDelta("a", 1, "\ufffd")
    assert total(run(TextStream(letters(), stop=["a\ufffd"]), [1, 28])) == TextDelta("b", 1, "a\ufffd")


@given(
    token_ids=st.lists(st.integers(0, 380), max_size=30),
    stop=st.text(alphabet="ae é\ufffd", min_size=1, max_size=2),
    min_tokens=st.integers(0, 3),
    sizes=st.lists(st.integers(0, 5), max_size=8),
)
def test_a_stop_string_cuts_the_text_of_any_byte_level_ids_and_changes_nothing_else(
    token_ids: list[int], stop: str, min_tokens: int, sizes: list[int]
) -> None:
    vocabulary = vocabulary_of("byte-level")
    whole = total(run(TextStream(vocabulary), token_ids))
    cut = total(run(TextStream(vocabulary, stop=[stop], min_tokens=min_tokens), token_ids, sizes))
    if cut.stop_string is None:
        assert cut == whole
    else:
        assert whole.text.startswith(cut.text + stop)


def test_tokens_after_a_stop_string_are_ignored() -> None:
    stream = TextStream(letters(), stop=["b"])
    assert stream.push(ids_of("abc")) == TextDelta("a", 1, "b")
    assert stream.push(ids_of("d")) == stream.finish(ids_of("e")) == TextDelta("", 0, "b")


def test_longest_of_the_stop_strings_completed_at_once_wins() -> None:
    assert total(run(TextStream(letters(), stop=["c", "bc", "abcd"]), ids_of("abcd"))) == TextDelta("a", 1, "bc")


def test_held_back_text_is_released_at_the_end() -> None:
    stream = TextStream(letters(), stop=["xyz"])
    assert stream.push(ids_of("axy")) == TextDelta("a", 1)
    assert stream.finish() == TextDelta("xy", 2)


@pytest.mark.parametrize("stop", [[], ["zz"]])
def test_an_incomplete_character_at_the_end_becomes_a_replacement_character(stop: list[str]) -> None:
    stream = TextStream(letters(), stop=stop)
    assert total([stream.push([0, 26]), stream.finish()]) == TextDelta("a\ufffd", 2)


def test_stop_token_counts_but_adds_no_text() -> None:
    hidden = TextStream(letters(), stop=["q"]).finish(ids_of("abc"), stop_token=True)
    shown = TextStream(letters(), stop=["q"], include_stop_str_in_output=True).finish(ids_of("abc"), stop_token=True)
    assert (hidden, shown) == (TextDelta("ab", 3), TextDelta("abc", 3))


def test_stop_string_just_before_the_stop_token_wins() -> None:
    assert TextStream(letters(), stop=["b"]).finish(ids_of("abc"), stop_token=True) == TextDelta("a", 1, "b")


def test_empty_stop_string_is_rejected() -> None:
    with pytest.raises(ValueError, match="empty"):
        TextStream(letters(), stop=["a", ""])


def test_context_keeps_the_space_between_prompt_and_output() -> None:
    prompt, output = (tokenizer_of("metaspace").encode(text).ids for text in ("quick", "brown"))
    alone = TextStream(vocabulary_of("metaspace")).finish(output).text
    continued = TextStream(vocabulary_of("metaspace"), context=prompt).finish(output).text
    assert (alone, continued) == ("brown", " brown")


def test_context_completes_a_character_that_began_in_the_prompt() -> None:
    assert TextStream(letters(), context=[0, 26]).finish([27, 1]) == TextDelta("éb", 2)


def test_special_tokens_are_in_the_text_on_request() -> None:
    token_ids = [*tokenizer_of("byte-level").encode("fox").ids, 0]
    assert TextStream(vocabulary_of("byte-level")).finish(token_ids).text == "fox"
    assert TextStream(vocabulary_of("byte-level"), skip_special_tokens=False).finish(token_ids).text == "fox<eos>"


@family
def test_broken_bytes_do_not_stall_the_text(name: str) -> None:
    tokenizer = tokenizer_of(name)
    broken = tokenizer.encode("¥").ids[:1] if name == "byte-level" else [1 + 0xF0]
    token_ids = [*broken * 3, *tokenizer.encode("quick").ids]
    stream = TextStream(vocabulary_of(name))
    deltas = [stream.push([token_id]) for token_id in token_ids]
    assert deltas[1].text == "\ufffd"
    assert lossy(total(deltas).text) == lossy(tokenizer.decode(token_ids))


@family
def test_token_bytes_join_to_the_text(name: str) -> None:
    token_ids = tokenizer_of(name).encode("naïve café, 😀 12 €").ids
    joined = b"".join(map(vocabulary_of(name).token_bytes, token_ids)).decode()
    assert joined.removeprefix(" ") == "naïve café, 😀 12 €"
    assert vocabulary_of(name).token_bytes(0) == b"<eos>"
    assert vocabulary_of(name).token_bytes(10**6) == b""


@pytest.mark.parametrize("stop", [[], ["\ufffdx"], ["bcd"], ["c\ufffdd"]])
def test_a_boundary_releases_held_text_and_ends_an_incomplete_character(stop: list[str]) -> None:
    stream = TextStream(letters(), stop=stop)
    before = [*(stream.push([token_id]) for token_id in (*ids_of("abc"), 26)), stream.boundary()]
    assert total(before) == TextDelta("abc\ufffd", 4)
    assert total([stream.push(ids_of("d")), stream.finish()]) == TextDelta("d", 1)


def test_a_stop_string_that_a_boundary_completes_ends_the_text() -> None:
    stream = TextStream(letters(), stop=["b\ufffd"])
    assert total([stream.push([0, 1, 26]), stream.boundary()]) == TextDelta("a", 1, "b\ufffd")
    assert stream.boundary() == TextDelta("", 0, "b\ufffd")


def test_the_token_at_a_boundary_counts_towards_min_tokens() -> None:
    stream = TextStream(letters(), stop=["b"], min_tokens=2)
    assert stream.push(ids_of("b")).stop_string is None
    stream.boundary()
    assert stream.push(ids_of("b")).stop_string == "b"
