"""The command line: `proa-gateway serve …` and `run-batch …`. Flags are the fields of their configurations."""

import argparse
import logging
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from types import FrameType
from typing import Any

from proa.environment import HELP
from proa.imports import importing
from proa.logs import LogOptions, configure
from proa.options import HelpFormatter, Parser, add_options, environment_warnings, from_arguments
from proa.tls import TlsSource
from proa_gateway.batch.config import BatchConfig
from proa_gateway.config import GatewayConfig

_Command = Callable[[argparse.ArgumentParser, argparse.Namespace], None]
GRPC_EXPERIMENTS = "-event_engine_client"
"""gRPC's EventEngine passes each message through a pool of threads. Without it, a program that only reads a session
takes two thirds of the CPU time for a message, and 2 context switches instead of 5 (docs/gateway-performance.md)."""


def main(argv: Sequence[str] | None = None) -> None:
    parser = make_parser()
    arguments = parser.parse_args(argv)
    arguments.run(parser, arguments)


def _serve(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        config = from_arguments(GatewayConfig, arguments, os.environ)
    except ValueError as error:
        parser.error(str(error))
    _serve_config(parser, config, environment_warnings(GatewayConfig, os.environ))


def _serve_given(parser: argparse.ArgumentParser, _: argparse.Namespace) -> None:
    config = pickle.load(sys.stdin.buffer)
    assert isinstance(config, GatewayConfig)
    _serve_config(parser, config)


def _serve_config(parser: argparse.ArgumentParser, config: GatewayConfig, warnings: Sequence[str] = ()) -> None:
    """Check the files and names in `config`, log the warnings, and serve."""
    try:
        if config.tls is not None:
            TlsSource(config.tls)  # checks the files
        if config.api_keys is not None:
            from proa_gateway.admission.auth import read_keys  # imports pydantic, which --help does not need

            read_keys(config.api_keys)
        from proa_gateway.parsing.known_formats import known_formats  # not needed by --help

        known_formats().check(config.tool_call_parser, config.reasoning_parser)
    except ValueError as error:
        parser.error(str(error))
    _prepare(config.logs)
    for line in warnings:
        logging.getLogger(__name__).warning(line)
    if config.access_log:
        from proa_gateway.http.middleware import write_access_log

        write_access_log(config.logs.log_format)
    with importing():
        from proa_gateway.server import serve  # slow to import, and --help does not need it

    serve(config)


def _run_batch(parser: argparse.ArgumentParser, arguments: argparse.Namespace) -> None:
    try:
        config = from_arguments(BatchConfig, arguments)
        _prepare(config.logs)
        from proa_gateway.batch.run import run

        sys.exit(run(config))
    except (OSError, ValueError) as error:
        parser.error(str(error))


def _prepare(logs: LogOptions) -> None:
    """Set up the process, before gRPC is imported."""
    configure(logs, "gateway")
    # PID 1 of a container ignores SIGTERM unless it has a handler. The server installs its own when it runs.
    signal.signal(signal.SIGTERM, _exit)
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)  # gRPC reads it when it is imported


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="proa-gateway", description="OpenAI-compatible gateway to Proa engines.")
    parser.add_argument("--version", action="version", version=version("proa-gateway"))
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add(commands, "serve", "serve the OpenAI API", GatewayConfig, _serve).epilog = HELP
    help = "send the requests of a file and write their responses to another"
    _add(commands, "run-batch", help, BatchConfig, _run_batch)
    commands.add_parser("serve-given").set_defaults(run=_serve_given)  # started by `proa serve`; not shown in the help
    for command in commands.choices.values():
        command.add_argument("--version", action="version", version=version("proa-gateway"))
    return parser


def _add(commands: Any, name: str, help: str, config: type, run: _Command) -> Parser:
    parser: Parser = commands.add_parser(name, help=help, formatter_class=HelpFormatter)
    add_options(parser, config)
    parser.set_defaults(run=run)
    return parser


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    main()
