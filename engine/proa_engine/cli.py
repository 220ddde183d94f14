"""The command line: `proa-engine serve` and `proa-engine worker`. Flags of `serve` are the fields of `ServeOptions`.

Each command imports its modules when it runs, because torch must not be imported before its number of threads is set.
"""

import argparse
import logging
import os
import pickle
import signal
import sys
import tempfile
from collections.abc import Sequence
from importlib.metadata import version
from types import FrameType

import msgspec

from proa.environment import HELP
from proa.imports import importing
from proa.logs import LogOptions, configure
from proa.options import HelpFormatter, Parser, add_options, environment_warnings, from_arguments
from proa_engine.server.options import ServeOptions

_PROGRAM = "engine"  # in lines of the log


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit status: 1 for a failure, 2 for wrong arguments."""
    arguments = make_parser().parse_args(argv)
    if os.path.expanduser("~") == "~":  # no HOME, and a user id that is not in /etc/passwd, as in containers
        os.environ["HOME"] = tempfile.gettempdir()  # the hub's library and Triton keep their files in it
    # PID 1 of a container ignores SIGTERM unless it has a handler. The server installs its own when it runs.
    signal.signal(signal.SIGTERM, _exit)
    status: int = arguments.run(arguments)
    return status


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="proa-engine", description="Proa's engine: generates tokens, serves gRPC.")
    parser.add_argument("--version", action="version", version=version("proa-engine"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="load a model and serve it", epilog=HELP, formatter_class=HelpFormatter)
    serve.set_defaults(run=_serve)
    add_options(serve, ServeOptions)
    given = commands.add_parser("serve-given")  # started by `proa serve`; not shown in the help
    given.set_defaults(run=_serve_given)
    download = commands.add_parser(
        "download",
        help="download the model, tokenizer and adapters that `serve` with the same flags would, and exit",
        epilog=HELP,
        formatter_class=HelpFormatter,
    )
    download.set_defaults(run=_download)
    add_options(download, ServeOptions)
    worker = commands.add_parser("worker", help="run one rank of an engine on its machine")
    worker.set_defaults(run=_worker)
    worker.add_argument("--rank", type=int, required=True, help="rank of this worker, from 1")
    worker.add_argument("--tensor-parallel-size", type=int, required=True, help="the engine's")
    worker.add_argument("--pipeline-parallel-size", type=int, default=1, help="the engine's (default: 1)")
    worker.add_argument("--socket", required=True, help="Unix socket on which to listen for the engine")
    add_options(worker, LogOptions)
    node_worker = commands.add_parser("node-worker")  # started by nodes; not shown in the help
    node_worker.set_defaults(run=_node_worker)
    node_worker.add_argument("setup")
    mover = commands.add_parser("mover")  # started by workers; not shown in the help
    mover.set_defaults(run=_mover)
    mover.add_argument("--control", type=int, required=True)
    mover.add_argument("--arena", type=int, required=True)
    for command in commands.choices.values():
        command.add_argument("--version", action="version", version=version("proa-engine"))
    return parser


def _serve(arguments: argparse.Namespace) -> int:
    try:
        options = from_arguments(ServeOptions, arguments, os.environ)
    except ValueError as error:
        return _print_error(str(error), status=2)
    return _serve_options(options, environment_warnings(ServeOptions, os.environ))


def _serve_given(_: argparse.Namespace) -> int:
    options = pickle.load(sys.stdin.buffer)
    assert isinstance(options, ServeOptions)
    return _serve_options(options)


def _serve_options(options: ServeOptions, warnings: Sequence[str] = ()) -> int:
    configure(options.logs, _PROGRAM)
    for line in warnings:
        logging.getLogger(__name__).warning(line)
    if options.config.parallel.node_rank:
        from proa_engine.ranks.node import run_node

        return run_node(options.engine_config)
    with importing():
        from proa_engine.server.serve import StartError, serve

    try:
        return serve(options)
    except StartError as error:
        return _fail(str(error), options.logs)


def _download(arguments: argparse.Namespace) -> int:
    from proa_engine.sources.resolve import download_model

    try:
        options = from_arguments(ServeOptions, arguments, os.environ)
    except ValueError as error:
        return _print_error(str(error), status=2)
    configure(options.logs, _PROGRAM)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        download_model(options.config)
    except (ValueError, OSError) as error:
        return _print_error(str(error), status=1)
    except KeyboardInterrupt:
        return _print_error("the download was interrupted; the next one continues it", status=1)
    return 0


def _worker(arguments: argparse.Namespace) -> int:
    from proa_engine.worker.main import run_worker

    logs = from_arguments(LogOptions, arguments)
    configure(logs, _PROGRAM, rank=arguments.rank)
    try:
        num_ranks = arguments.tensor_parallel_size * arguments.pipeline_parallel_size
        return run_worker(arguments.rank, num_ranks, arguments.socket)
    except ValueError as error:
        return _print_error(str(error), status=2)
    except OSError as error:
        return _fail(f"cannot listen on {arguments.socket}: {error}", logs)


def _node_worker(arguments: argparse.Namespace) -> int:
    from proa_engine.ranks.connect import NodeRank, RankRefused
    from proa_engine.worker.main import run_node_worker

    rank = msgspec.json.decode(arguments.setup, type=NodeRank)
    logs = LogOptions.from_environment()
    configure(logs, _PROGRAM, rank=rank.hello.rank)
    try:
        return run_node_worker(rank)
    except (RankRefused, ValueError) as error:
        return _fail(str(error), logs)


def _mover(arguments: argparse.Namespace) -> int:
    from proa_engine.mover.process import run_mover

    configure(LogOptions.from_environment(), _PROGRAM)
    return run_mover(arguments.control, arguments.arena)


def _fail(reason: str, logs: LogOptions) -> int:
    """Report the reason as the last line, in the format of the log."""
    if logs.log_format == "text":
        return _print_error(reason, status=1)
    logging.getLogger(__name__).critical(reason)
    return 1


def _print_error(message: str, *, status: int) -> int:
    print(f"proa-engine: error: {message}", file=sys.stderr)
    return status


def _exit(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


if __name__ == "__main__":
    sys.exit(main())
