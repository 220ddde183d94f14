"""Commands of the command line, in tables. A command's module is imported when it runs: help and version stay quick."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from proa.options import HelpFormatter, Parser


@dataclass(frozen=True, slots=True)
class Command:
    """A command and the function that runs it: `function(parser, words)` in `module` returns the exit status. `parser`
    knows --help and --version, the command adds its arguments to it; `words` are those behind the command's name."""

    name: str
    help: str
    module: str
    function: str = "main"


def make_parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=name,
        description=description,
        formatter_class=HelpFormatter,
        conflict_handler="resolve",  # of a benchmark's own flags and the engine's
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("proa"))
    return parser


def dispatch(parser: argparse.ArgumentParser, commands: Sequence[Command], words: Sequence[str]) -> int:
    """Run the command that `words` begin with; returns its exit status. `parser` shows help, also without words, and
    errors."""
    for command in commands:
        if words[:1] == [command.name]:
            own = make_parser(f"{parser.prog} {command.name}", command.help)
            status: int = getattr(import_module(command.module), command.function)(own, words[1:])
            return status
    listed = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in commands:
        listed.add_parser(command.name, help=command.help)
    if not words:
        parser.print_help()
        return 2
    parser.parse_args(words)
    return 0
