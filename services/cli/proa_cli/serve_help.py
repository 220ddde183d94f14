"""What `proa serve --help` prints: the flags that people use first, in groups. `--help=all` adds all others."""

import argparse
import sys
from collections.abc import Collection
from importlib.metadata import version
from typing import NoReturn

from proa.environment import HELP
from proa.options import HelpFormatter, add_options
from proa_cli.arguments import NOT_HERE
from proa_engine.server.options import ServeOptions
from proa_gateway.config import GatewayConfig

WORDS = frozenset(("-h", "--help", "--help=all", "--version"))
FIRST = {
    "server": ("--host", "--port", "--api-key", "--config", "--log-level"),
    "model": (
        "--served-model-name",
        "--max-model-len",
        "--dtype",
        "--quantization",
        "--chat-template",
        "--tool-call-parser",
        "--reasoning-parser",
        "--enable-lora",
        "--lora-modules",
    ),
    "memory and speed": (
        "--gpu-memory-utilization",
        "--kv-cache-dtype",
        "--kv-offloading-size",
        "--max-num-seqs",
        "--max-num-batched-tokens",
        "--speculative-config",
    ),
    "several GPUs": ("--tensor-parallel-size", "--pipeline-parallel-size", "--enable-expert-parallel"),
}
"""Names of flags by their group, which begin every help."""


def show(words: Collection[str]) -> NoReturn:
    """Print what `words`, of which at least one is in `WORDS`, ask for, and exit."""
    if "--version" in words:
        print(version("proa"))
    else:
        make_help(shows_all="--help=all" in words).print_help()
    sys.exit(0)


def make_help(*, shows_all: bool) -> argparse.ArgumentParser:
    """Return a parser that is there to be printed."""
    flags = _flags()
    parser = argparse.ArgumentParser(
        prog="proa serve",
        usage="%(prog)s MODEL [--FLAG ...] [-- COMMAND ...]",
        description="Run an engine and a gateway until Ctrl-C, or for as long as COMMAND runs.",
        formatter_class=HelpFormatter,
        epilog=HELP if shows_all else f"--help=all shows all {len(flags)} flags and their environment variables.",
        add_help=False,
    )
    parser.add_argument("MODEL", help="a folder, an id of the Hugging Face hub, or builtin")
    titles = {name: title for title, names in FIRST.items() for name in names}
    groups = {title: parser.add_argument_group(title) for title in FIRST}
    for name in (*titles, *(name for name in flags if shows_all and name not in titles)):
        title, action = flags[name]
        title = titles.get(name, title)
        if title not in groups:
            groups[title] = parser.add_argument_group(title)
        groups[title]._add_action(action)
    return parser


def _flags() -> dict[str, tuple[str, argparse.Action]]:
    """Each flag by its long name, with the title of its group. Of a flag of both programs, it is the gateway's."""
    flags: dict[str, tuple[str, argparse.Action]] = {}
    for title, config in (("engine", ServeOptions), ("gateway", GatewayConfig)):
        parser = argparse.ArgumentParser(add_help=False)
        add_options(parser, config)
        for group in parser._action_groups:
            own = title if group.title in ("options", title) else str(group.title)
            for action in group._group_actions:
                flags.pop(_name(action), None)  # it would keep its place
                flags[_name(action)] = own, action
    help = "YAML file of flags, which those of the command line override"
    flags["--config"] = "server", argparse.Action(["--config"], "config", metavar="FILE", help=help)
    return {name: each for name, each in flags.items() if name not in NOT_HERE}


def _name(action: argparse.Action) -> str:
    """The long name, without "no-" in front."""
    return next(name for name in action.option_strings if name.startswith("--"))
