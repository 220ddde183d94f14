"""What `proa serve` should make of its arguments: configurations of its programs, by the words of their own flags."""

from proa.options import from_arguments
from proa_engine.cli import make_parser as make_engine_parser
from proa_engine.server.options import ServeOptions
from proa_gateway.cli import make_parser as make_gateway_parser
from proa_gateway.config import GatewayConfig


def engine(*words: str) -> ServeOptions:
    """Of the engine that `proa-engine serve` would be with these flags, on the address that `proa serve` gives it."""
    parsed = make_engine_parser().parse_args(["serve", "--host=127.0.0.1", *words])
    return from_arguments(ServeOptions, parsed)


def gateway(*words: str) -> GatewayConfig:
    """Of the gateway to this engine that `proa-gateway serve` would be with these flags."""
    parsed = make_gateway_parser().parse_args(["serve", "--engine=127.0.0.1:50051", *words])
    return from_arguments(GatewayConfig, parsed)
