"""The command line: `proa serve …`."""

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import version

from proa.options import HelpFormatter, Parser


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    if words[:1] == ["serve"] and not {"-h", "--help"} & set(words):
        from proa_cli.serve import serve  # reads the flags of both programs itself

        return serve(words[1:])
    make_parser().parse_args(words)
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of what is not `proa serve MODEL …`: help and versions."""
    parser = Parser(prog="proa", description="Proa on one machine.")
    parser.add_argument("--version", action="version", version=version("proa"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="run an engine and a gateway", formatter_class=HelpFormatter, conflict_handler="resolve"
    )
    from proa_cli.arguments import add_help

    add_help(serve)
    return parser
