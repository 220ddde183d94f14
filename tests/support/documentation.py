"""The commands and snippets of the documentation: of its pages, and of the docstrings that scripts show as help.

Commands are lines of fenced blocks and texts in backticks that begin with a program of `PROGRAMS`. In a block with the
prompt `$ ` every other line is output, in which `…` stands for any text.
"""

import ast
import re
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = ("*.md", "docs/*.md", "k8s/*.md", "charts/proa/*.md", "training/*.md", "tests/gpu/*.md")
SCRIPTS = ("benchmarks/**/*.py", "tests/browser/*.py", "tests/peers/*.py", "training/*.py")
PROGRAMS = (
    *("curl", "helm", "kubectl", "make", "pip", "pytest", "python", "python3"),
    *("proa", "proa-engine", "proa-gateway"),
)
SHELL = ("", "bash", "console", "sh")  # languages of fenced blocks that may have commands

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SPAN = re.compile(r"`([^`]+)`")
_BEGINNING = re.compile(rf"(?:[A-Z_]+=\S* +)*(?:{'|'.join(PROGRAMS)})(?= )")
_VARIABLE = re.compile(r"([A-Z_]+)=(.*)")
_HERE_DOCUMENT = re.compile(r"<<(\w+)")


@dataclass(frozen=True, slots=True)
class Snippet:
    """A fenced block, without its fences. `line`: of its first line, from 1."""

    page: str
    line: int
    language: str
    text: str


@dataclass(frozen=True, slots=True)
class Command:
    """`output` is empty where the page shows none."""

    page: str
    line: int
    text: str
    output: str = ""

    def __str__(self) -> str:
        return f"{self.page}:{self.line}: {' '.join(self.text.split())[:80]}"

    @property
    def program(self) -> str:
        return self.words[0]

    @property
    def environment(self) -> dict[str, str]:
        """The variables that stand before the program."""
        return dict(pair for word in self._all_words if (pair := _assignment(word)) is not None)

    @property
    def words(self) -> tuple[str, ...]:
        """The program and its arguments. Placeholders of further arguments (`…`) and `&` are left out."""
        words = self._all_words
        first = next(index for index, word in enumerate(words) if _assignment(word) is None)
        return tuple(word for word in words[first:] if word not in ("…", "&"))

    @property
    def flags(self) -> list[str]:
        return [word.partition("=")[0] for word in self.words if word.startswith("--")]

    @property
    def _all_words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def _assignment(word: str) -> tuple[str, str] | None:
    found = _VARIABLE.fullmatch(word)
    return (found[1], found[2]) if found else None


@cache
def snippets() -> tuple[Snippet, ...]:
    """All fenced blocks of the pages, in their order."""
    return tuple(
        Snippet(page, text.count("\n", 0, match.start(2)) + 1, match[1], match[2])
        for page, text in _files(PAGES)
        for match in _FENCE.finditer(text)
    )


@cache
def commands() -> tuple[Command, ...]:
    """All commands of the pages and docstrings; those of one text are in its order within blocks, then backticks."""
    found = [command for snippet in snippets() if snippet.language in SHELL for command in _of_block(snippet)]
    for page, text in _files(PAGES):
        prose = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), text)
        found += _in_backticks(page, prose, 1)
    for page, text in _files(SCRIPTS):
        docstring = ast.get_docstring(ast.parse(text)) or ""
        lines = [line.removeprefix("    ") if line.startswith("    ") else "" for line in docstring.splitlines()]
        found += _of_block(Snippet(page, 1, "", "\n".join(lines)))
        found += _in_backticks(page, docstring, 1)
    return tuple(found)


def _files(patterns: Sequence[str]) -> Iterator[tuple[str, str]]:
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            yield str(path.relative_to(ROOT)), path.read_text()


def _of_block(snippet: Snippet) -> Iterator[Command]:
    lines = snippet.text.splitlines()
    has_prompts = any(line.startswith("$ ") for line in lines)
    index = 0
    while index < len(lines):
        first = index
        text = lines[index]
        index += 1
        if not (text.startswith("$ ") if has_prompts else _BEGINNING.match(text)):
            continue
        text = text.removeprefix("$ ")
        while not _is_complete(text):
            assert index < len(lines), f"{snippet.page}:{snippet.line + first}: the command does not end: {text}"
            text += f"\n{lines[index]}"
            index += 1
        output = list(takewhile(lambda line: not line.startswith("$ "), lines[index:] if has_prompts else ()))
        yield Command(snippet.page, snippet.line + first, text, "\n".join(output))


def _is_complete(text: str) -> bool:
    if text.endswith("\\"):
        return False
    if here := _HERE_DOCUMENT.search(text):
        return text.endswith(f"\n{here[1]}")
    try:
        shlex.split(text, comments=True)
    except ValueError:  # a quotation that is open
        return False
    return True


def _in_backticks(page: str, text: str, line: int) -> Iterator[Command]:
    for match in _SPAN.finditer(text):
        if _BEGINNING.match(match[1]):
            yield Command(page, line + text.count("\n", 0, match.start()), " ".join(match[1].split()))
