"""The command line: `proa-gateway serve …`."""

import argparse
import logging
import re
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from proa.tls import TlsFiles, TlsSource
from proa_gateway.config import Deadlines, GatewayConfig
from proa_gateway.routing.policies import POLICIES

_ADDRESS = re.compile(r".+:[0-9]+")
_SERVICE = re.compile(r"[^.:]+\.[^:]+:[0-9]+")


def main(argv: Sequence[str] | None = None) -> None:
    arguments = _parser().parse_args(argv)
    logging.basicConfig(level=arguments.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Until serving handles it. A container's first process is not ended by a signal that it leaves to the default.
    signal.signal(signal.SIGTERM, _leave)
    from proa_gateway.server import serve  # after the arguments: --help should not wait for what serving needs

    serve(config_from(arguments))


def _leave(_number: int, _frame: FrameType | None) -> None:
    sys.exit(0)


def config_from(arguments: argparse.Namespace) -> GatewayConfig:
    return GatewayConfig(
        engines=tuple(arguments.engine or ()),
        engine_service=arguments.engine_service,
        host=arguments.host,
        port=arguments.port,
        tokenizer=arguments.tokenizer,
        routing=arguments.routing,
        stream_interval=arguments.stream_interval,
        models=tuple(arguments.model or ()),
        api_keys=arguments.api_keys,
        max_concurrent_requests=arguments.max_concurrent_requests,
        max_waiting_requests=arguments.max_waiting_requests,
        max_queued_tokens=arguments.max_queued_tokens,
        tls=_tls_files(arguments),
        tls_server_name=arguments.tls_server_name,
        max_body_bytes=arguments.max_body_bytes,
        deadlines=Deadlines(
            queue=arguments.queue_timeout,
            scale_from_zero=arguments.scale_from_zero_timeout,
            request=arguments.request_timeout,
            first_token=arguments.first_token_timeout,
            next_token=arguments.next_token_timeout,
            shutdown=arguments.drain_timeout,
        ),
    )


def _parser() -> argparse.ArgumentParser:
    defaults, deadlines = GatewayConfig(), Deadlines()
    parser = argparse.ArgumentParser(prog="proa-gateway", description="Proa's gateway: the OpenAI API before engines.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    serve = commands.add_parser(
        "serve", help="serve the OpenAI API", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    engines = serve.add_mutually_exclusive_group(required=True)
    engines.add_argument("--engine", action="append", type=_address, metavar="HOST:PORT", help="repeat for several")
    engines.add_argument(
        "--engine-service", type=_service, metavar="NAME.NAMESPACE:PORT", help="engines are this Service's endpoints"
    )
    serve.add_argument("--host", default=defaults.host, help="address to listen on")
    serve.add_argument("--port", type=int, default=defaults.port, help="port to listen on")
    serve.add_argument("--tokenizer", type=_folder, metavar="FOLDER", help="instead of what the engines send")
    serve.add_argument(
        "--routing",
        choices=POLICIES,
        default=defaults.routing,
        help="how an engine is chosen: by what its cache holds and its load, by load, in turn, or by session",
    )
    serve.add_argument(
        "--stream-interval", type=_positive, default=defaults.stream_interval, help="tokens merged into one event"
    )
    serve.add_argument(
        "--max-concurrent-requests",
        type=_positive,
        default=defaults.max_concurrent_requests,
        help="output sequences at once; over it 429",
    )
    serve.add_argument(
        "--max-queued-tokens",
        type=_positive,
        default=defaults.max_queued_tokens,
        help="prompt tokens of those that wait for the engines to have room; over it 429",
    )
    serve.add_argument(
        "--max-waiting-requests",
        type=_positive,
        default=defaults.max_waiting_requests,
        help="that wait for the engines to have room; over it 429",
    )
    serve.add_argument(
        "--queue-timeout", type=_seconds, default=deadlines.queue, help="seconds that one may wait so; over it 503"
    )
    serve.add_argument(
        "--scale-from-zero-timeout",
        type=_seconds,
        default=deadlines.scale_from_zero,
        help="seconds to hold requests for a known model without an engine; 0: 503 at once",
    )
    serve.add_argument(
        "--model", action="append", metavar="NAME", help="known though no engine has brought it; repeat for several"
    )
    serve.add_argument(
        "--api-keys", type=_keys, metavar="FILE", help="JSON; callers, their limits and priorities. Reread on change"
    )
    serve.add_argument("--tls-ca", type=Path, metavar="FILE", help="who signs the engines' certificates (PEM)")
    serve.add_argument("--tls-cert", type=Path, metavar="FILE", help="the gateway's certificate for the engines")
    serve.add_argument("--tls-key", type=Path, metavar="FILE", help="its key; all three are read for each connection")
    serve.add_argument(
        "--tls-server-name", default=defaults.tls_server_name, metavar="NAME", help="in the engines' certificates"
    )
    serve.add_argument("--max-body-bytes", type=_positive, default=defaults.max_body_bytes, help="over it 413")
    serve.add_argument(
        "--request-timeout", type=_seconds, default=deadlines.request, help="seconds that one request may take in all"
    )
    serve.add_argument("--first-token-timeout", type=float, default=deadlines.first_token, help="seconds")
    serve.add_argument("--next-token-timeout", type=float, default=deadlines.next_token, help="seconds")
    serve.add_argument(
        "--drain-timeout", type=float, default=deadlines.shutdown, help="seconds for running answers on shutdown"
    )
    serve.add_argument("--log-level", choices=["debug", "info", "warning", "error"], default="info", help=" ")
    return parser


def _address(value: str) -> str:
    if not _ADDRESS.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is not HOST:PORT")
    return value


def _service(value: str) -> str:
    if not _SERVICE.fullmatch(value):
        raise argparse.ArgumentTypeError(f"{value!r} is not NAME.NAMESPACE:PORT")
    return value


def _folder(value: str) -> Path:
    if not (Path(value) / "tokenizer.json").is_file():
        raise argparse.ArgumentTypeError(f"there is no tokenizer.json in {value!r}")
    return Path(value)


def _keys(value: str) -> Path:
    from proa_gateway.admission.auth import read_keys

    try:
        read_keys(Path(value))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return Path(value)


def _seconds(value: str) -> float:
    try:
        seconds = float(value)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise argparse.ArgumentTypeError(f"{value!r} is not a number of seconds")
    return seconds


def _tls_files(arguments: argparse.Namespace) -> TlsFiles | None:
    """What channels to engines need. Leaves with a sentence where that cannot be used."""
    try:
        files = TlsFiles(certificate=arguments.tls_cert, key=arguments.tls_key, authority=arguments.tls_ca)
        if files.authority is None and files.certificate is not None:
            raise ValueError("--tls-cert needs --tls-ca")
        TlsSource(files)
    except ValueError as error:
        _parser().error(str(error))
    return None if files.authority is None else files


def _positive(value: str) -> int:
    if not value.isdigit() or int(value) < 1:
        raise argparse.ArgumentTypeError(f"{value!r} is not a number above 0")
    return int(value)


if __name__ == "__main__":
    main()
