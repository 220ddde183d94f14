from collections.abc import Sequence
from functools import partial

import pytest

from proa.contract import Grammar
from proa.grammar import GrammarError, check
from proa_engine.core.grammar import GrammarCursor
from proa_gateway.parsing.format import FunctionTool, NamedTool, PythonCall, ToolChoice, ToolFormat
from proa_gateway.parsing.formats import PYTHONIC
from proa_gateway.parsing.grammars.message import Reasoning, answer_grammar, reasoning_grammar, tool_grammar
from proa_gateway.parsing.json_formats import HARMONY, HERMES
from proa_gateway.parsing.tagged_formats import KIMI_K3, MUSE_GLIMMER, QWEN3_CODER
from support.format_writers import WRITERS, Writer
from support.tool_grammars import FormatTokenizer, TestMatcher, accepts_message, format_tokenizer

WEATHER = FunctionTool(
    "weather",
    {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}, "required": ["city"]},
    strict=True,
)
CLOCK = FunctionTool("clock")
WEATHER_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
CLOCK_CALL = '<tool_call>\n{"name": "clock", "arguments": {"any": 1}}\n</tool_call>'
WRONG_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": 5}}\n</tool_call>'

TEXT = format_tokenizer()
MARKERS = format_tokenizer("<think>", "</think>", "<tool_call>", "</tool_call>")
BOTH = pytest.mark.parametrize("tokenizer", [TEXT, MARKERS], ids=["text", "markers"])


def grammar(
    choice: ToolChoice,
    tokenizer: FormatTokenizer,
    *,
    tool_format: ToolFormat = HERMES,
    tools: Sequence[FunctionTool] = (WEATHER, CLOCK),
    parallel: bool = True,
    reasoning: Reasoning = Reasoning.CLOSED,
    answer: Grammar | None = None,
    max_reasoning_tokens: int | None = None,
) -> Grammar:
    made = tool_grammar(
        tool_format,
        tools,
        choice,
        parallel=parallel,
        reasoning=reasoning,
        added_tokens=tokenizer.added_tokens,
        answer=answer,
        max_reasoning_tokens=max_reasoning_tokens,
    )
    assert made is not None
    check(made.grammar.text)
    return made.grammar


@BOTH
def test_required_allows_calls_and_nothing_else(tokenizer: FormatTokenizer) -> None:
    required = grammar("required", tokenizer)
    assert accepts_message(required, WEATHER_CALL, tokenizer)
    assert accepts_message(required, f"{WEATHER_CALL}\n{CLOCK_CALL}", tokenizer)
    for text in ("", "Hello", f"Hello {WEATHER_CALL}", f"{WEATHER_CALL} Hello", WRONG_CALL, WEATHER_CALL[:-3]):
        assert not accepts_message(required, text, tokenizer)


@BOTH
def test_without_parallel_calls_one_is_allowed(tokenizer: FormatTokenizer) -> None:
    required = grammar("required", tokenizer, parallel=False)
    assert accepts_message(required, WEATHER_CALL, tokenizer)
    assert not accepts_message(required, f"{WEATHER_CALL}\n{CLOCK_CALL}", tokenizer)


@BOTH
def test_a_named_tool_is_called_once(tokenizer: FormatTokenizer) -> None:
    named = grammar(NamedTool("clock"), tokenizer)
    assert accepts_message(named, CLOCK_CALL, tokenizer)
    for text in (WEATHER_CALL, f"{CLOCK_CALL}\n{CLOCK_CALL}"):
        assert not accepts_message(named, text, tokenizer)


@BOTH
def test_auto_with_a_strict_tool_constrains_calls_and_no_text(tokenizer: FormatTokenizer) -> None:
    auto = grammar("auto", tokenizer)
    for text in ("", "Hello", WEATHER_CALL, f"Hello {WEATHER_CALL} and\n{CLOCK_CALL} bye"):
        assert accepts_message(auto, text, tokenizer), text
    for text in (WRONG_CALL, f"Hello {WRONG_CALL}", f"{CLOCK_CALL}\n{WRONG_CALL}", "<tool_call>"):
        assert not accepts_message(auto, text, tokenizer), text


def test_auto_without_a_strict_tool_has_no_grammar() -> None:
    arguments = {"parallel": True, "reasoning": Reasoning.CLOSED, "added_tokens": {}}
    assert tool_grammar(HERMES, [CLOCK], "auto", **arguments) is None  # type: ignore[arg-type]


@BOTH
def test_auto_with_an_answer_allows_calls_or_the_answer(tokenizer: FormatTokenizer) -> None:
    both = grammar("auto", tokenizer, tools=[CLOCK], answer=Grammar(text='start: WORD\nWORD: "yes" | "no"\n'))
    for text in ("yes", CLOCK_CALL):
        assert accepts_message(both, text, tokenizer)
    for text in ("maybe", f"yes{CLOCK_CALL}", ""):
        assert not accepts_message(both, text, tokenizer)


@BOTH
def test_reasoning_is_free_where_the_prompt_leaves_it_open(tokenizer: FormatTokenizer) -> None:
    required = grammar("required", tokenizer, reasoning=Reasoning.OPEN)
    for text in (f"Let me see.</think>\n\n{CLOCK_CALL}", f"</think>{CLOCK_CALL}"):
        assert accepts_message(required, text, tokenizer)
    for text in (CLOCK_CALL, "Let me see.</think>\n\nHello", "Let me see."):
        assert not accepts_message(required, text, tokenizer)


def follow(grammar: Grammar, text: str, tokenizer: FormatTokenizer) -> bool:
    """Whether the grammar allows the tokens of the text."""
    cursor = GrammarCursor(grammar, TestMatcher(grammar, tokenizer))
    return all(cursor.accept(token_id) for token_id in tokenizer.encode(text))


@pytest.mark.parametrize("max_tokens", [0, 1, 3])
@pytest.mark.parametrize("reasoning", [Reasoning.OPEN, Reasoning.OPTIONAL])
def test_reasoning_is_closed_after_its_budget_and_the_rest_is_free(max_tokens: int, reasoning: Reasoning) -> None:
    bounded = reasoning_grammar(HERMES, max_tokens, reasoning, MARKERS.added_tokens)
    assert bounded is not None
    check(bounded.text)
    opening = "<think>" if reasoning is Reasoning.OPTIONAL else ""
    for used in range(max_tokens + 1):
        text = opening + "q" * used
        assert follow(bounded, f"{text}</think>{'free ' * 9}{CLOCK_CALL}<tool_call>", MARKERS)
        assert follow(bounded, f"{text}q", MARKERS) is (used < max_tokens)
    assert follow(bounded, "q" * 9, MARKERS) is (reasoning is Reasoning.OPTIONAL), "no reasoning, no budget"


def test_reasoning_without_tokens_of_its_own_has_no_budget() -> None:
    assert reasoning_grammar(HERMES, 5, Reasoning.OPEN, TEXT.added_tokens) is None
    for tool_format in (HARMONY, PYTHONIC):
        assert reasoning_grammar(tool_format, 5, Reasoning.OPTIONAL, MARKERS.added_tokens) is None


@pytest.mark.parametrize("max_tokens", [0, 2])
@pytest.mark.parametrize("reasoning", [Reasoning.OPEN, Reasoning.OPTIONAL])
def test_calls_and_answers_follow_bounded_reasoning(max_tokens: int, reasoning: Reasoning) -> None:
    yes = Grammar(text='start: "yes"\n')
    answer = answer_grammar(
        HERMES,
        yes,
        reasoning=reasoning,
        added_tokens=MARKERS.added_tokens,
        max_reasoning_tokens=max_tokens,
    )
    check(answer.text)
    bounded = partial(grammar, tokenizer=MARKERS, reasoning=reasoning, max_reasoning_tokens=max_tokens)
    cases = [
        (bounded("required"), [WEATHER_CALL, f"{CLOCK_CALL}\n{WEATHER_CALL}"], ["Hello", WRONG_CALL]),
        (bounded(NamedTool("clock")), [CLOCK_CALL], [WEATHER_CALL]),
        (bounded("auto"), ["", "Hello", WEATHER_CALL, f"Hello {CLOCK_CALL} bye"], [f"Hello {WRONG_CALL}"]),
        (bounded("auto", answer=yes), ["yes", WEATHER_CALL], ["", "no", WRONG_CALL]),
        (answer, ["yes"], ["", "no"]),
    ]
    for made, right, wrong in cases:
        openings = ["", "<think>"] if reasoning is Reasoning.OPEN else ["<think>"]
        for before in [opening + "q" * max_tokens for opening in openings]:
            assert not follow(made, f"{before}q", MARKERS)
            for text in right:
                assert accepts_message(made, f"{before}</think>\n\n{text}", MARKERS), text
            for text in wrong:
                assert not accepts_message(made, f"{before}</think>\n\n{text}", MARKERS), text
        assert accepts_message(made, right[0], MARKERS) is (reasoning is Reasoning.OPTIONAL), "no reasoning"


def test_reasoning_that_its_bound_cuts_within_a_character_is_closed() -> None:
    made = grammar("required", MARKERS, reasoning=Reasoning.OPEN, max_reasoning_tokens=1)
    first, *_ = MARKERS.encode("日")
    cursor = GrammarCursor(made, TestMatcher(made, MARKERS))
    assert all(map(cursor.accept, [first, *MARKERS.encode(f"</think>{CLOCK_CALL}")]))
    assert cursor.is_complete or cursor.matcher.is_accepting


def test_a_structural_tag_that_begins_with_a_token_excludes_a_bound() -> None:
    tag = Grammar(text='start: "yes"\n', start_after=(5,))
    arguments = {"reasoning": Reasoning.OPEN, "added_tokens": MARKERS.added_tokens}
    assert answer_grammar(HERMES, tag, **arguments) is tag  # type: ignore[arg-type]
    with pytest.raises(GrammarError, match="a bound of the reasoning"):
        answer_grammar(HERMES, tag, max_reasoning_tokens=3, **arguments)  # type: ignore[arg-type]


@BOTH
def test_reasoning_is_free_where_the_model_opens_it(tokenizer: FormatTokenizer) -> None:
    required = grammar("required", tokenizer, reasoning=Reasoning.OPTIONAL)
    for text in (f"<think>Let me see.</think>\n\n{CLOCK_CALL}", CLOCK_CALL):
        assert accepts_message(required, text, tokenizer)
    for text in (f"Let me see.</think>{CLOCK_CALL}", "<think>Let me see.</think>Hello", "<think>"):
        assert not accepts_message(required, text, tokenizer)


@BOTH
def test_an_answer_begins_after_reasoning(tokenizer: FormatTokenizer) -> None:
    answer = Grammar(text='start: "yes"\n')
    made = answer_grammar(HERMES, answer, reasoning=Reasoning.OPEN, added_tokens=tokenizer.added_tokens)
    assert accepts_message(made, "Hm.</think>\n\nyes", tokenizer)
    assert not accepts_message(made, "yes", tokenizer)
    assert answer_grammar(HERMES, answer, reasoning=Reasoning.CLOSED, added_tokens={}) is answer


def test_a_strict_tool_whose_schema_cannot_be_held_is_refused_by_name() -> None:
    schema = {"type": "object", "properties": {"a": {"not": {"minLength": 1}}}}
    with pytest.raises(GrammarError, match=r"tool 'f' with strict: \$\.a: not is not supported"):
        grammar("auto", TEXT, tools=[FunctionTool("f", schema, strict=True)])
    assert "not" not in grammar("required", TEXT, tools=[FunctionTool("f", schema)]).text


@pytest.mark.parametrize("tool_format", [HERMES, QWEN3_CODER], ids=lambda each: each.name)
def test_parameters_that_are_no_schema_are_refused_where_a_call_is_demanded(tool_format: ToolFormat) -> None:
    wrong = FunctionTool("f", {"type": "object", "properties": {"a": {"type": "float"}}})
    reason = r"tool 'f' has an invalid 'parameters' schema: \$\.a: type 'float' is none of array, boolean"
    for choice in ("required", NamedTool("f")):
        with pytest.raises(GrammarError, match=reason):
            grammar(choice, TEXT, tool_format=tool_format, tools=[CLOCK, wrong])
    grammar(NamedTool("clock"), TEXT, tool_format=tool_format, tools=[CLOCK, wrong])
    grammar("auto", TEXT, tool_format=tool_format, tools=[WEATHER, wrong])


def test_definitions_of_one_name_are_those_of_their_own_tool() -> None:
    def tool(name: str, kind: str) -> FunctionTool:
        fields = {"properties": {"value": {"$ref": "#/$defs/Value"}}, "required": ["value"]}
        return FunctionTool(name, {"type": "object", **fields, "$defs": {"Value": {"type": kind}}})

    required = grammar("required", TEXT, tools=[tool("count", "integer"), tool("name", "string")])
    call = '<tool_call>\n{{"name": "{}", "arguments": {{"value": {}}}}}\n</tool_call>'
    for name, value, is_valid in (
        ("count", 1, True),
        ("count", '"a"', False),
        ("name", '"a"', True),
        ("name", 1, False),
    ):
        assert accepts_message(required, call.format(name, value), TEXT) is is_valid


def test_what_a_format_cannot_hold_leaves_its_own_argument_free() -> None:
    text = {"type": "string", "allOf": [{"maxLength": 1}]}
    schema = {"type": "object", "properties": {"a": text, "b": {"type": "integer"}}, "required": ["a", "b"]}
    tools = [FunctionTool("f", schema)]
    made = tool_grammar(
        QWEN3_CODER, tools, "required", parallel=False, reasoning=Reasoning.CLOSED, added_tokens=TEXT.added_tokens
    )
    assert made is not None
    reason = "allOf is not supported for a string in this format of tool calls, so it is not enforced"
    assert made.warnings == (f"tool 'f': $.a: {reason}",)
    values = "<parameter=a>\nlong\n</parameter>\n<parameter=b>\n{}\n</parameter>"
    call = f"<tool_call>\n<function=f>\n{values}\n</function>\n</tool_call>"
    assert accepts_message(made.grammar, call.format(1), TEXT)
    assert not accepts_message(made.grammar, call.format('"x"'), TEXT)
    with pytest.raises(GrammarError, match="tool 'f' with strict: allOf is not supported for a string"):
        grammar("required", TEXT, tool_format=QWEN3_CODER, tools=[FunctionTool("f", schema, strict=True)])


def test_names_are_escaped_in_json() -> None:
    required = grammar("required", TEXT, tools=[FunctionTool('a"b')])
    assert accepts_message(required, '<tool_call>\n{"name": "a\\"b", "arguments": {}}\n</tool_call>', TEXT)


CHANNELS = format_tokenizer("<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|start|>")
THINKS = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>"
HARMONY_CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Oslo"}'


def test_in_channels_a_call_may_follow_reasoning_and_preambles() -> None:
    required = grammar("required", CHANNELS, tool_format=HARMONY)
    for text in (HARMONY_CALL, f"{THINKS}{HARMONY_CALL}", f"{THINKS}{PREAMBLE}{THINKS}{HARMONY_CALL}"):
        assert accepts_message(required, text, CHANNELS), text
    for text in (f"{FINAL}Hello", THINKS, f"{THINKS}{FINAL}", HARMONY_CALL[:-1], "Hello", HARMONY_CALL * 2):
        assert not accepts_message(required, text, CHANNELS), text


def test_in_channels_auto_allows_an_answer_or_a_call() -> None:
    auto = grammar("auto", CHANNELS, tool_format=HARMONY)
    for text in (f"{THINKS}{FINAL}Hello.", f"{FINAL}", HARMONY_CALL):
        assert accepts_message(auto, text, CHANNELS), text
    assert not accepts_message(auto, HARMONY_CALL.replace('"Oslo"', "5"), CHANNELS)
    with_answer = grammar("auto", CHANNELS, tool_format=HARMONY, answer=Grammar(text='start: "yes"\n'))
    assert accepts_message(with_answer, f"{THINKS}{FINAL}yes", CHANNELS)
    assert not accepts_message(with_answer, f"{FINAL}no", CHANNELS)


def test_in_channels_an_answer_is_in_its_channel() -> None:
    answer = Grammar(text='start: "yes"\n')
    made = answer_grammar(HARMONY, answer, reasoning=Reasoning.CLOSED, added_tokens=CHANNELS.added_tokens)
    auto = grammar("auto", CHANNELS, tool_format=HARMONY, answer=answer)
    for one in (made, auto):
        assert accepts_message(one, f"{THINKS}{FINAL}yes", CHANNELS)
        for text in ("yes", f"{PREAMBLE}{FINAL}yes"):
            assert not accepts_message(one, text, CHANNELS), "all of the content matches"


RECIPIENTS = format_tokenizer("<|start|>", "<|message|>", "<|eom|>", "<|eot|>")
TO_ITSELF = " to=self<|message|>Hm.<|eom|><|start|>assistant"
TO_USER = " to=user<|message|>"
TO_TOOL = (
    ' to=weather<|message|><atem:function_calls>\n<atem:invoke name="weather">\n'
    '<atem:parameter name="city">Oslo</atem:parameter>\n</atem:invoke>\n</atem:function_calls>'
)


def test_each_of_several_calls_is_a_message_to_its_tool() -> None:
    required = grammar("required", RECIPIENTS, tool_format=MUSE_GLIMMER)
    parameter = '<atem:parameter name="city">Oslo</atem:parameter>\n'
    clock = TO_TOOL.replace("weather", "clock").replace(parameter, "")
    next_message = "<|eom|><|start|>assistant"
    for text in (
        TO_TOOL,
        f"{TO_ITSELF}{TO_USER}I look.{next_message}{TO_TOOL}",
        f"{TO_ITSELF}{TO_TOOL}{next_message}{clock}{next_message}{TO_TOOL}",
    ):
        assert accepts_message(required, text, RECIPIENTS), text
    for text in ("Hi", f"{TO_USER}Hi", TO_ITSELF, TO_TOOL[:-1], TO_TOOL * 2, TO_TOOL.replace("to=weather", "to=clock")):
        assert not accepts_message(required, text, RECIPIENTS), text
    for one in (
        grammar("required", RECIPIENTS, tool_format=MUSE_GLIMMER, parallel=False),
        grammar(NamedTool("weather"), RECIPIENTS, tool_format=MUSE_GLIMMER),
    ):
        assert accepts_message(one, f"{TO_ITSELF}{TO_TOOL}", RECIPIENTS)
        assert not accepts_message(one, f"{TO_TOOL}{next_message}{TO_TOOL}", RECIPIENTS)


def test_an_answer_is_a_message_to_the_user() -> None:
    yes = Grammar(text='start: "yes"\n')
    made = answer_grammar(MUSE_GLIMMER, yes, reasoning=Reasoning.CLOSED, added_tokens=RECIPIENTS.added_tokens)
    auto = grammar("auto", RECIPIENTS, tool_format=MUSE_GLIMMER, answer=yes)
    for one in (made, auto):
        assert accepts_message(one, f"{TO_ITSELF}{TO_USER}yes", RECIPIENTS)
        preamble = f"{TO_USER}I look.<|eom|><|start|>assistant"
        for text in ("yes", f"{TO_USER}no", f"{preamble}{TO_USER}yes", TO_TOOL.replace("city", "town")):
            assert not accepts_message(one, text, RECIPIENTS), text
    assert accepts_message(auto, TO_TOOL, RECIPIENTS)
    assert not accepts_message(made, TO_TOOL, RECIPIENTS)


@pytest.mark.parametrize(
    "writer",
    # Their grammar has JSON's double quotes, where the models mostly write single ones.
    [writer for writer in WRITERS if not isinstance(writer.tool_format.arguments, PythonCall)],
    ids=lambda writer: writer.tool_format.name,
)
def test_auto_constrains_the_calls_of_each_format(writer: Writer) -> None:
    tokenizer = format_tokenizer(*writer.tokens)
    auto = grammar("auto", tokenizer, tool_format=writer.tool_format)
    right, wrong = {"city": "Oslo", "days": 3}, {"city": "Oslo", "days": "x"}
    assert accepts_message(auto, f"{writer.answer}Hello.", tokenizer)
    assert accepts_message(auto, writer.calls([("weather", right)]), tokenizer)
    assert not accepts_message(auto, writer.calls([("weather", wrong)]), tokenizer)
    assert not accepts_message(auto, writer.calls([("unknown", {})]), tokenizer)


def test_where_all_parts_begin_alike_auto_constrains_calls_alone() -> None:
    tokenizer = format_tokenizer("<|open|>", "<|close|>", "<|sep|>")
    auto = grammar("auto", tokenizer, tool_format=KIMI_K3)
    answer = "<|open|>response<|sep|>Let me see.<|close|>response<|sep|>"
    writer = next(each for each in WRITERS if each.tool_format is KIMI_K3)
    right, wrong = (writer.calls([("weather", {"city": "Oslo", "days": days})]) for days in (3, "x"))
    for text in (
        answer,
        f"{answer}<|close|>message<|sep|>",
        f"{answer}{right}",
        f"{answer}{right}<|close|>message<|sep|>",
    ):
        assert accepts_message(auto, text, tokenizer), text
    for text in (f"{answer}{wrong}", wrong, "<|open|>other<|sep|>"):
        assert not accepts_message(auto, text, tokenizer), text


def test_auto_of_python_calls_allows_text_that_does_not_begin_like_them() -> None:
    auto = grammar("auto", TEXT, tool_format=PYTHONIC)
    for text in ("", "Hello [1].", '[weather(city="Oslo", days=3)]', '[clock(), weather(city="x")]'):
        assert accepts_message(auto, text, TEXT), text
    for text in ("[1]", " [clock()", '[weather(days="x")]', "[weather()]"):
        assert not accepts_message(auto, text, TEXT), text
