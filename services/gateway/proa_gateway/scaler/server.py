"""Serves the scaler's gRPC services beside the HTTP API, in the same event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from functools import partial

import grpc

from proa.addresses import host_and_port
from proa_gateway.keep_running import keep_running
from proa_gateway.scaler.config import ScalerOptions
from proa_gateway.scaler.demand import Demand
from proa_gateway.scaler.peers import follow_peers
from proa_gateway.scaler.service import ExternalScaler, Waiting
from proa_gateway.scaler.v1 import externalscaler_pb2_grpc, waiting_pb2_grpc

GRACE = 1.0  # seconds for calls to end after `Demand.close`
SERVER_OPTIONS = (
    ("grpc.so_reuseport", 0),  # a port in use is an error, not a second server behind it
    ("grpc.http2.max_ping_strikes", 0),  # of other gateways' pings
)
_log = logging.getLogger(__name__)


class ScalerPortInUse(OSError):
    """The port of the scaler cannot be listened on."""


@asynccontextmanager
async def serve_scaler(options: ScalerOptions, host: str, name: str, demand: Demand) -> AsyncIterator[None]:
    """Serve until exit; nothing if no port is configured. `name` identifies this gateway. Raises `ScalerPortInUse`.

    On exit streams end with the status OK: KEDA then opens them again, at another gateway, without a delay that grows.
    """
    if not options.scaler_port:
        yield
        return
    server = grpc.aio.server(options=SERVER_OPTIONS)
    externalscaler_pb2_grpc.add_ExternalScalerServicer_to_server(ExternalScaler(demand), server)
    waiting_pb2_grpc.add_WaitingServiceServicer_to_server(Waiting(demand, name), server)
    address = host_and_port(host, options.scaler_port)
    try:
        server.add_insecure_port(address)
    except RuntimeError as error:  # gRPC's, without a reason in it
        raise ScalerPortInUse(f"cannot listen on {address} (--scaler-port)") from error
    await server.start()
    _log.info("external scaler for KEDA on %s", address)
    follow = partial(follow_peers, options.scaler_peers, name, demand)
    peers = asyncio.create_task(keep_running("looking for other gateways", follow), name="other gateways")
    try:
        yield
    finally:
        peers.cancel()
        with suppress(asyncio.CancelledError):
            await peers
        demand.close()
        await server.stop(GRACE)
