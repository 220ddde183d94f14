"""The command line: `proa-engine serve` and `proa-engine worker`.

Flags are EngineConfig's fields with vLLM's names. Each command imports what it needs when it runs, so that torch
comes only after the number of its threads is set.
"""

import argparse
import logging
import signal
import sys
from collections.abc import Sequence
from dataclasses import MISSING, Field, fields
from importlib.metadata import version
from pathlib import Path
from types import FrameType, UnionType
from typing import Any, Literal, get_args, get_origin, get_type_hints

from proa.tls import TlsFiles
from proa_engine.config import EngineConfig
from proa_engine.speculative_config import SpeculativeConfig

HELP = {
    "model": "`builtin`, a folder in the Hugging Face layout, or an id on its hub",
    "revision": "branch, tag or commit of a hub model",
    "served_model_name": "the name clients ask for (default: the model's, or proa-builtin)",
    "tokenizer": "folder or hub id of the tokenizer (default: the model's own)",
    "skip_tokenizer_init": "serve token ids alone, without a tokenizer",
    "load_format": "`dummy`: random weights of the model's shapes",
    "dtype": "of weights and activations (auto: float32 on a CPU, else the model's own)",
    "quantization": "`fp8` also quantizes weights that are not (default: as the checkpoint is)",
    "kv_cache_dtype": "of the KV cache (auto: that of activations; fp8: e4m3, half of bfloat16's memory)",
    "seed": "of dummy weights; requests over gRPC bring their own",
    "max_model_len": "tokens of prompt and output together (default: the model's context)",
    "max_num_seqs": "requests that run at once",
    "max_num_batched_tokens": "tokens computed in one step",
    "max_waiting_requests": "requests that wait before more are refused",
    "block_size": "tokens in a block of the KV cache",
    "num_gpu_blocks_override": "blocks of the KV cache, instead of what fits into memory",
    "kv_cache_memory_bytes": "size of the KV cache, instead of what fits into memory",
    "gpu_memory_utilization": "share of the device's memory to use",
    "enable_prefix_caching": "reuse the KV cache of equal prompt beginnings",
    "async_scheduling": "plan the next step while one runs",
    "enforce_eager": "on a GPU: launch every kernel anew instead of replaying CUDA graphs",
    "batch_invariant": "a request's tokens do not depend on what else runs, to the bit (on a CPU they never do); "
    "slower, and not with quantized weights, experts or tensor parallelism on GPUs",
    "scheduling_policy": "who goes first: by arrival, or by priority",
    "speculative_config": "drafts to be checked, as JSON: "
    '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 5, "prompt_lookup_min": 1} (default: none)',
    "max_logprobs": "log probabilities that a request may ask for at each position",
    "device": "where to compute (auto: a GPU if there is one)",
    "tensor_parallel_size": "ranks that share the model",
    "worker_sockets": "Unix socket of a worker that runs on its own, once for each rank from 1 (default: spawn them)",
}
FLAGS = {"worker_sockets": "--worker-socket"}  # given several times, so in the singular


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status: 1 for what could not be done, 2 for what was asked wrongly."""
    arguments = make_parser().parse_args(argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    logging.captureWarnings(True)
    # Until serving handles it. A container's first process is not ended by a signal that it leaves to the default.
    signal.signal(signal.SIGTERM, _leave)
    command: int = arguments.run(arguments)
    return command


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="proa-engine", description="Proa's engine: generates tokens behind gRPC.")
    parser.add_argument("--version", action="version", version=version("proa-engine"))
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _add_serve(commands.add_parser("serve", help="load a model and serve it", formatter_class=_Formatter))
    _add_worker(commands.add_parser("worker", help="compute one tensor-parallel rank of an engine"))
    return parser


class _Formatter(argparse.ArgumentDefaultsHelpFormatter):
    """Tells the defaults that are values; what None means is in the help text."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, ()) else super()._get_help_string(action)


def _add_serve(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_serve)
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=_port, default=50051, help="gRPC port")
    parser.add_argument("--metrics-port", type=_port, default=9400, help="port of the Prometheus metrics; 0: none")
    parser.add_argument(
        "--drain-timeout", type=_seconds, default=60.0, help="seconds that running requests have to finish on SIGTERM"
    )
    parser.add_argument(
        "--step-timeout",
        type=_seconds,
        default=5.0,
        help="a step is late, and the engine not ready, this many seconds after ten times the largest warm-up step",
    )
    parser.add_argument(
        "--health-port", type=_port, default=0, help="plaintext port with health alone, for probes under TLS; 0: none"
    )
    parser.add_argument("--tls-cert", type=Path, metavar="FILE", help="certificate (PEM); read again when it changes")
    parser.add_argument("--tls-key", type=Path, metavar="FILE", help="its key")
    parser.add_argument("--tls-ca", type=Path, metavar="FILE", help="who must have signed the certificates of clients")
    group = parser.add_argument_group("engine")
    hints = get_type_hints(EngineConfig)
    for field in fields(EngineConfig):
        _add_field(group, field, hints[field.name])


def _add_field(group: Any, field: Field[Any], hint: Any) -> None:
    flag = FLAGS.get(field.name, "--" + field.name.replace("_", "-"))
    options: dict[str, Any] = {"dest": field.name, "help": HELP[field.name]}
    if field.default is MISSING:
        options["required"] = True
    else:
        options["default"] = field.default
    hint = _without_none(hint)
    if hint is bool:
        options["action"] = argparse.BooleanOptionalAction
    elif get_origin(hint) is Literal:
        options["choices"] = get_args(hint)
    elif hint is SpeculativeConfig:
        options |= {"type": _speculative_config, "metavar": "JSON"}
    elif get_origin(hint) is tuple:
        options |= {"action": "append", "default": None}
    else:
        options["type"] = hint
    group.add_argument(flag, **options)


def _without_none(hint: Any) -> Any:
    if get_origin(hint) is not UnionType:
        return hint
    (inner,) = (part for part in get_args(hint) if part is not type(None))
    return inner


def _add_worker(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_worker)
    parser.add_argument("--rank", type=int, required=True, help="of this worker, from 1")
    parser.add_argument("--tensor-parallel-size", type=int, required=True, help="ranks that share the model")
    parser.add_argument("--socket", required=True, help="Unix socket to listen on for the engine")


def _serve(arguments: argparse.Namespace) -> int:
    try:
        config = config_from_arguments(arguments)
        tls = _tls_files(arguments)
    except ValueError as error:
        return _fail(str(error), status=2)
    from proa_engine.server.options import ServeOptions
    from proa_engine.server.serve import StartError, serve

    options = ServeOptions(
        config=config,
        host=arguments.host,
        port=arguments.port,
        metrics_port=arguments.metrics_port,
        drain_timeout=arguments.drain_timeout,
        step_timeout=arguments.step_timeout,
        health_port=arguments.health_port,
        tls=tls,
    )
    try:
        return serve(options)
    except StartError as error:
        return _fail(str(error), status=1)


def _tls_files(arguments: argparse.Namespace) -> TlsFiles | None:
    files = TlsFiles(certificate=arguments.tls_cert, key=arguments.tls_key, authority=arguments.tls_ca)
    if files.certificate is None and files.authority is not None:
        raise ValueError("--tls-ca needs --tls-cert and --tls-key")
    return None if files.certificate is None else files


def config_from_arguments(arguments: argparse.Namespace) -> EngineConfig:
    """Raises `ValueError` for values that cannot be."""
    values = {field.name: getattr(arguments, field.name) for field in fields(EngineConfig)}
    return EngineConfig(**values | {"worker_sockets": tuple(values["worker_sockets"] or ())})


def _worker(arguments: argparse.Namespace) -> int:
    from proa_engine.worker.main import run_worker

    try:
        return run_worker(arguments.rank, arguments.tensor_parallel_size, arguments.socket)
    except ValueError as error:
        return _fail(str(error), status=2)
    except OSError as error:
        return _fail(f"cannot listen on {arguments.socket}: {error}", status=1)


def _fail(sentence: str, *, status: int) -> int:
    print(f"proa-engine: error: {sentence}", file=sys.stderr)
    return status


def _speculative_config(text: str) -> SpeculativeConfig:
    try:
        return SpeculativeConfig.from_json(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _port(text: str) -> int:
    port = int(text)
    if not 0 <= port <= 65535:
        raise argparse.ArgumentTypeError(f"{port} is not a port")
    return port


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above zero")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
