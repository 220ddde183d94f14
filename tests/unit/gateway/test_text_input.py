"""Inputs of custom tools: what their grammars allow in each format of calls, and what is read back."""

import json
from random import Random

import pytest

from proa.contract import Grammar
from proa.grammar import GrammarError, check
from proa_gateway.parsing.format import (
    INPUT,
    INPUT_SCHEMA,
    FunctionTool,
    ObjectLiteral,
    Tagged,
    TextGrammar,
    ToolChoice,
    ToolFormat,
)
from proa_gateway.parsing.grammars.message import Reasoning, tool_grammar
from proa_gateway.parsing.input_text import InputText
from proa_gateway.parsing.json_formats import HERMES
from proa_gateway.parsing.json_text import escape
from proa_gateway.parsing.tagged_formats import GLM45, QWEN3_CODER
from proa_gateway.parsing.tagged_reader import Tags
from support.format_writers import WRITERS, Writer
from support.text_grammars import EXEC, TEXT_CASES, TextCase
from support.thorough import THOROUGH, seeds
from support.tool_grammars import (
    FormatTokenizer,
    accepts_message,
    builtin_format_tokenizer,
    format_tokenizer,
    parse_message,
    random_message,
)

CASES = [(writer, has_tokens) for writer in WRITERS for has_tokens in (True, False) if has_tokens or writer.may_be_text]
FORMATS = pytest.mark.parametrize(
    ("writer", "has_tokens"),
    CASES,
    ids=[f"{writer.tool_format.name}-{'tokens' if has_tokens else 'text'}" for writer, has_tokens in CASES],
)
TEXT = format_tokenizer()


def grammar_of(
    text: TextGrammar,
    tool_format: ToolFormat = QWEN3_CODER,
    tokenizer: FormatTokenizer = TEXT,
    choice: ToolChoice = "required",
) -> Grammar:
    tools = [FunctionTool("edit", INPUT_SCHEMA, strict=True, text=text)]
    made = tool_grammar(
        tool_format,
        tools,
        choice,
        parallel=False,
        reasoning=Reasoning.CLOSED,
        added_tokens=tokenizer.added_tokens,
    )
    assert made is not None
    assert not made.warnings
    check(made.grammar.text)
    return made.grammar


def tokenizer_of(writer: Writer, has_tokens: bool) -> FormatTokenizer:
    return format_tokenizer(*(writer.tokens if has_tokens else ()))


def input_of(arguments: str, size: int = 1_000_000) -> str:
    text = InputText()
    parts = [text.feed(arguments[at : at + size]) for at in range(0, len(arguments), size)]
    return "".join([*parts, text.close()])


def closings(tool_format: ToolFormat) -> list[str]:
    """What ends an input in this format, and what leads to a call, which random tokens seldom do."""
    match tool_format.arguments:
        case Tagged() as syntax:
            tags = Tags.of(syntax)
            closing = tags.after_value + tags.close_of(INPUT)
            to_call = ["<|eom|>", " to=edit"] if tool_format.channels else []
            return [closing, *([tags.quotes[1] + closing] if tags.quotes else []), *to_call]
        case ObjectLiteral(quote):
            return [quote]
    return ['"', "<|end|>", "<|channel|>commentary to=functions.edit"]


def written(writer: Writer, text: str) -> str:
    return writer.calls([("edit", {INPUT: text})])


@FORMATS
def test_every_call_that_the_grammar_allows_has_an_input_of_its_language(writer: Writer, has_tokens: bool) -> None:
    tokenizer = builtin_format_tokenizer(*(writer.tokens if has_tokens else ()))
    turn = CASES.index((writer, has_tokens)) % len(TEXT_CASES)
    for case in TEXT_CASES if THOROUGH else TEXT_CASES[turn : turn + 1]:
        grammar = grammar_of(case.grammar, writer.tool_format, tokenizer)
        exits = [*case.exits, *map(escape, case.exits), *closings(writer.tool_format)]
        for seed in seeds(2, thorough=9):
            token_ids = random_message(grammar, tokenizer, Random(seed), exits)
            message = parse_message(writer.tool_format, token_ids, tokenizer, {"edit": INPUT_SCHEMA})
            (call,) = message.calls
            text = input_of(call.arguments)
            assert json.loads(call.arguments) == {INPUT: text}
            assert case.is_input(text), text


@FORMATS
@pytest.mark.parametrize("case", TEXT_CASES, ids=[case.name for case in TEXT_CASES])
def test_the_input_is_allowed_and_others_are_not(writer: Writer, has_tokens: bool, case: TextCase) -> None:
    assert case.is_input(case.example)
    tokenizer = tokenizer_of(writer, has_tokens)
    grammar = grammar_of(case.grammar, writer.tool_format, tokenizer)
    assert accepts_message(grammar, spelled(writer, case.example), tokenizer)
    wrong = "" if case is EXEC else case.example.replace('"', "\r", 1).removesuffix("\t") + "x"
    assert not accepts_message(grammar, spelled(writer, wrong), tokenizer)


def spelled(writer: Writer, text: str) -> str:
    """The call as the grammar has it: a Python string with the escapes of JSON."""
    if writer.tool_format.name in ("pythonic", "lfm2", "olmo3"):
        return writer.calls([("edit", {})]).replace("()", f"(input={json.dumps(text, ensure_ascii=False)})")
    return written(writer, text)


@FORMATS
def test_an_input_comes_back_exactly(writer: Writer, has_tokens: bool) -> None:
    tokenizer = tokenizer_of(writer, has_tokens)
    for text in ("", " ", "\n", " a\n\n", "\n\na ", "null", "true", "12", '"a"', "[1]", "{}", "\\n", "ü😀\u2028"):
        token_ids = tokenizer.encode(written(writer, text))
        message = parse_message(writer.tool_format, token_ids, tokenizer, {"edit": INPUT_SCHEMA})
        assert [input_of(call.arguments) for call in message.calls] == [text]


def test_a_grammar_is_enforced_with_tool_choice_auto() -> None:
    grammar = grammar_of(TextGrammar("regex", "[0-9]+"), choice="auto")
    assert accepts_message(grammar, "Hello", TEXT)
    assert accepts_message(grammar, f"Hello {call('12')}", TEXT)
    assert not accepts_message(grammar, f"Hello {call('a')}", TEXT)


def call(text: str) -> str:
    """In Qwen3-Coder's format."""
    return f"<tool_call>\n<function=edit>\n<parameter=input>\n{text}\n</parameter>\n</function>\n</tool_call>"


def test_an_input_cannot_contain_what_ends_it() -> None:
    tokenizer = format_tokenizer("<arg_value>", "</arg_value>")
    for tool_format, end in ((QWEN3_CODER, "</parameter>"), (GLM45, "</arg_value>")):
        grammar = grammar_of(EXEC.grammar, tool_format, tokenizer).text
        assert f'& ~(/(?s:.*)/ "{end}" /(?s:.*)/)' in grammar


LARK = {
    'start: "a" | "b" "c"': (["a", "bc"], ["", "ac", "b"]),
    'start: "a"?\n| ("b" | "c")+ [ "d" ]': (["", "a", "bcd", "c"], ["ab", "d", "bdd"]),
    'start: x~2..3 y{2} z{1,} x{,1} "e" ~ 2\nx: "x"\ny: "y"\nz: "z"': (["xxyyzee", "xxxyyzzxee"], ["xyyzee", "xxyzee"]),
    'start: "ab"i "\\t\\u0041\\x42\\"\\\\" "0".."3"': (['aB\tAB"\\2', 'Ab\tAB"\\0'], ['ab\tab"\\2', 'ab\tAB"\\4']),
    "start: A // a comment\nA: B+ # another\nB: /[a-c]/": (["abc"], ["", "d"]),
    "start: /[a-c]+/i /x.y/s /(?i:z)w/": (["AbCx\nyZw"], ["AbCx\nyZW"]),
    '?start: _a -> first | b\n_a.2: "a"\nb: "b"\nB: "never"': (["a", "b"], ["never"]),
    '!start: "a"': (["a"], ["b"]),
    "start: A B\n%import common.INT -> A\n%import common (CNAME, WS)\nB: CNAME | WS": (["1a_1", "12 \n"], ["a", "1-"]),
    'start: "a" "b" C\nC: "c" "d"\n%ignore " "\n%ignore /#[^\\n]*\\n/': (["abcd", "a #x\n  b cd "], [" abcd", "abc d"]),
    "start: /\\d\\s\\w\\S/ /[^\\W\\d]/": (["1 ü.é"], ["ü ü.é", "1 ü.1", "1.ü.é"]),
    'start: (\n  "a"\n  | "b"\n)': (["a", "b"], ["ab"]),
}


@pytest.mark.parametrize("tool_format", [HERMES, QWEN3_CODER], ids=["json", "raw"])
@pytest.mark.parametrize(("lark", "texts"), LARK.items(), ids=map(str, range(len(LARK))))
def test_the_language_of_a_lark_grammar(lark: str, texts: tuple[list[str], list[str]], tool_format: ToolFormat) -> None:
    (writer,) = [writer for writer in WRITERS if writer.tool_format is tool_format]
    grammar = grammar_of(TextGrammar("lark", lark), tool_format)
    inputs, others = texts
    for text in inputs:
        assert accepts_message(grammar, written(writer, text), TEXT), text
    for text in others:
        assert not accepts_message(grammar, written(writer, text), TEXT), text


@pytest.mark.parametrize("tool_format", [HERMES, QWEN3_CODER], ids=["json", "raw"])
def test_the_language_of_a_regular_expression(tool_format: ToolFormat) -> None:
    (writer,) = [writer for writer in WRITERS if writer.tool_format is tool_format]
    for pattern, inputs, others in [
        (r"^(?P<month>May|June)\s+(?<day>\d{1,2})(?:st|nd)?$", ["May 1st", "June\n12"], ["May", "June 12th"]),
        (r"a*?[^\x00-\x1f]\$", ["aa$", "\\$", '"$', "ü$"], ["\x01$", "a", "\n$"]),
        (r"a\\$", ["a\\"], ["a", "a\\$"]),
        ("(?i)ß|[a-k]x", ["KX", "bx"], ["zx"]),
        ("", [""], ["a"]),
        (".*", ["", 'a\\"\t\x1f\x7f'], ["\n"]),
    ]:
        grammar = grammar_of(TextGrammar("regex", pattern), tool_format)
        for text in inputs:
            assert accepts_message(grammar, written(writer, text), TEXT), (pattern, text)
        for text in others:
            assert not accepts_message(grammar, written(writer, text), TEXT), (pattern, text)


REFUSED = {
    "a: b": 'must be written in Lark, with a rule "start:"',
    "start: b": "does not define 'b'",
    'start: "a': "syntax error at '\"a'",
    "start: (": "syntax error where a line or the grammar ends",
    "start: )": "syntax error at ')'",
    'start: "a"\nstart: "b"': "defines 'start' twice",
    "start: %json {}": "%json is not supported",
    '%llguidance {}\nstart: "a"': "%llguidance is not supported",
    "start: <|end|>": "special tokens, such as '<|end|>'",
    'start: x{"a"}\nx{y}: y y': "templates, such as 'x'",
    'start[lazy]: "a"': "attributes of a rule, such as those of 'start'",
    "start: A\n%import python.A": "only terminals of common",
    "start: A\n%import common.A": "common has no 'A'",
    "start: /^a/": "anchors and word boundaries",
    r"start: /a\b/": "anchors and word boundaries",
    "start: /(?=a)a/": "look-around",
    r"start: /(a)\1/": "references to groups",
    "start: /a++/": "that give nothing back",
    r"start: /\p{L}/": r"invalid regex: bad escape \p",
    "start: /[[:alpha:]]/": "within the class '[[:alpha:]'",
    "start: /[a-z&&[^b]]/": "within the class",
    "start: /a/x": "the flag 'x'",
    "start: A\nA: a\na: A": "the rule 'a' cannot be a part of a terminal",
    "start: A\nA: B\n%ignore start\nB: /b/": "the rule 'start' cannot be a part of a terminal",
    f"start: /{'[' * 5000}/": "must be at most 4096 characters long",
    "start: A\nA: A": "a terminal of the grammar contains itself",
    'start: "a"{2,1}': "got 2 to 1",
    'start: "b".."a"': "must be between two characters",
    'start: "\\q"': r"the escape '\\q'",
    f"start: {'(' * 60}": "nested at most 50 levels",
    f"start: /{'(' * 60}a{')' * 60}/": "nested at most 50 levels",
    "start: " + " ".join(["a"] * 200) + '\na: "' + "x" * 100 + '"': "at most 16384 characters",
    'start: a a a a a a a a a\na: b b b b b b b b b b\nb: "x"* "y"* /.*/ "z"* "x"* "y"*': "at most 16384 characters",
    f"start: {'/[à-ü][à-ü]/ ' * 1000}": "regular expressions must be at most 16384 characters long together",
    "\n".join(f'r{index}: "a"' for index in range(400)): "at most 300 rules",
}


@pytest.mark.parametrize(("lark", "sentence"), REFUSED.items(), ids=map(str, range(len(REFUSED))))
def test_what_cannot_be_held_is_refused(lark: str, sentence: str) -> None:
    with pytest.raises(GrammarError) as error:
        grammar_of(TextGrammar("lark", lark))
    assert str(error.value).startswith("tool 'edit': ")
    assert sentence in str(error.value)


SUM = 'start: term ("+" term)*\nterm: NUMBER | "(" start ")"\n%import common.NUMBER\n%import common.WS\n%ignore WS'
ASSIGNED = "start: /[^;]*/ | start start"


@FORMATS
def test_a_recursive_grammar_is_held_if_its_terminals_are_unlike_what_ends_the_input(
    writer: Writer, has_tokens: bool
) -> None:
    tokenizer = tokenizer_of(writer, has_tokens)
    grammar = grammar_of(TextGrammar("lark", SUM), writer.tool_format, tokenizer)
    assert accepts_message(grammar, spelled(writer, "(1 +\n2.5) + ((3))\n"), tokenizer)
    for text in ("(1", "1 +", "1 2", ""):
        assert not accepts_message(grammar, spelled(writer, text), tokenizer)
    with pytest.raises(GrammarError, match="a recursive grammar is not supported in this format of tool calls unless"):
        grammar_of(TextGrammar("lark", ASSIGNED), writer.tool_format, tokenizer)


ARGUMENTS = [
    ('{"input": "a\\n\\"\\\\\\/\\u00fc\\ud83d\\ude00 ü😀"}', 'a\n"\\/ü😀 ü😀'),
    (' {\n "input" :"a", "b": "c"}', "a"),
    ('{"input": "\\\\u0041\\\\"}', "\\u0041\\"),
    ('{"input": "\\ud83d a \\ude00 \\ud83d\\u0041 \\ud83d\\n"}', "\ufffd a \ufffd \ufffdA \ufffd\n"),
    ('{"input": "\\q \\u12 \\u12g4"}', "\\q \\u12 \\u12g4"),
    ('{"input": "a\nb', "a\nb"),
    ('{"input": "a\\', "a"),
    ('{"input": "a\\ud83d', "a\ufffd"),
    ('{"input": "a\\ud83d\\ude', "a\ufffd"),
    ('{"input": ""}', ""),
    ("{}", ""),
    ("", ""),
    ('{"input": {"a": "ü"}}', '{"a": "ü"}'),
    ('{"other": 1, "input": "a\\ud83d"}', "a\ufffd"),
    ('{"patch": "a"}', '{"patch": "a"}'),
    ("no JSON", "no JSON"),
    (f"{' ' * 100}{{}} ", ""),
]


@pytest.mark.parametrize(("arguments", "text"), ARGUMENTS)
def test_the_input_of_arguments_in_pieces(arguments: str, text: str) -> None:
    for size in (*range(1, 9), 1_000_000):
        assert input_of(arguments, size) == text


def test_the_input_comes_as_the_arguments_do() -> None:
    text = InputText()
    assert [text.feed(piece) for piece in ('{"inp', 'ut": "a', "b\\", "nc\\u00", "fcd", '"', "}")] == [
        *("", "a", "b", "\nc", "üd", "", ""),
    ]
    assert text.close() == ""
