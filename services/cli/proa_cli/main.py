"""The command line: `proa COMMAND …`. A command's module is imported when it runs: help and version stay quick."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version

from proa.options import HelpFormatter, Parser


@dataclass(frozen=True, slots=True)
class Command:
    """`module` has `main(parser, words)`, which returns the exit status. `parser` knows --help and --version, the
    command adds its arguments to it; `words` are those behind the command's name."""

    name: str
    help: str
    module: str


COMMANDS = (Command("serve", "run an engine and a gateway", "proa_cli.serve"),)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    for command in COMMANDS:
        if words[:1] == [command.name]:
            status: int = import_module(command.module).main(_parser(f"proa {command.name}", command.help), words[1:])
            return status
    parser = _parser("proa", "Proa on one machine.")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    for command in COMMANDS:
        commands.add_parser(command.name, help=command.help)
    parser.parse_args(words)
    return 0


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = Parser(
        prog=name,
        description=description,
        formatter_class=HelpFormatter,
        conflict_handler="resolve",  # `serve` has flags that both its programs have
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=version("proa"))
    return parser
