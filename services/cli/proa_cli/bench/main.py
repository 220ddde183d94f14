"""`proa bench serve`."""

import argparse
from collections.abc import Sequence

from proa_cli.commands import Command, dispatch

COMMANDS = (Command("serve", "measure a running server with the requests of many clients", "proa_cli.bench.serve"),)


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    return dispatch(parser, COMMANDS, words)
