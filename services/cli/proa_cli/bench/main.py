"""`proa bench serve | latency | throughput`."""

import argparse
from collections.abc import Sequence

from proa_cli.commands import Command, dispatch

COMMANDS = (
    Command("serve", "measure a running server with the requests of many clients", "proa_cli.bench.serve"),
    Command("latency", "measure how long the engine takes for one batch", "proa_cli.bench.latency"),
    Command("throughput", "measure how many tokens a second the engine makes", "proa_cli.bench.throughput"),
)


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    return dispatch(parser, COMMANDS, words)
