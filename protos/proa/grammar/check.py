"""check: whether llguidance can compile a grammar, without a tokenizer. Token ids in it are not checked."""

import re

from llguidance import LLMatcher, LLParserLimits

MAX_MESSAGE = 300  # characters
TOO_COMPLEX = "the grammar is too complex or malformed"

_SOURCE = re.compile(r"\s*\d+ \|.*|[\s^]*")  # a quoted line of the grammar, or the line that marks a place in it
_PLACE = re.compile(r"^(?:at )?(?:\d+\(\d+\): )+|^at EOF: ")
_ONE_OF = "oneOf is supported only if its schemas cannot overlap, unless strict is false"


class GrammarError(ValueError):
    """A constraint that cannot be held, with a sentence for the client."""


def check(text: str) -> None:
    """Raises `GrammarError` if the grammar cannot be compiled.

    Takes 0.5 ms for a usual schema and seconds for the worst that `lower` lets through, and releases the interpreter
    lock: call it in a thread, and keep verdicts by text. The thread needs a stack of 8 MiB, Linux's default.
    """
    limits = LLParserLimits(verbose_errors=False)
    try:
        failed, messages = LLMatcher.validate_grammar_with_warnings(text, limits=limits)
    except BaseException as error:
        if not is_panic(error):
            raise
        raise GrammarError(TOO_COMPLEX) from None
    if failed:
        raise GrammarError(clean(messages[0]))


def is_panic(error: BaseException) -> bool:
    """Whether llguidance panicked, which it does, for example, when it cuts a message inside of a character, and at
    more than 65,525 symbols. pyo3's PanicException is not an Exception and cannot be imported."""
    return type(error).__name__ == "PanicException"


def clean(message: str) -> str:
    """One line of llguidance's message, without the place in the lowered text and quotations of it."""
    lines = [line.strip() for line in message.splitlines() if not _SOURCE.fullmatch(line)]
    if not lines or lines[0].startswith("panic:"):
        return TOO_COMPLEX
    sentence = _PLACE.sub("", lines[0]).replace("failed to compile JSON schema: ", "JSON schema: ")
    details = [line for line in lines[1:] if line.startswith("error: ")]
    if details:  # of a regular expression
        sentence = sentence.replace("(in regex): regex parse error:", "").strip()
        sentence = sentence.replace("regex parse error:", "invalid regex")  # of a JSON schema, without its text
        sentence = f"{sentence}: {details[-1].removeprefix('error: ')}"
    sentence = re.sub(r"oneOf constraints are not supported\..*", _ONE_OF, sentence)
    sentence = re.sub(r"Unimplemented keys: \[(.*)\]", r"not supported: \1", sentence)
    return sentence if len(sentence) <= MAX_MESSAGE else f"{sentence[:MAX_MESSAGE]}…"
