"""Learns how many requests wait in the other gateways: a stream from each."""

import asyncio
import logging
import socket
from collections.abc import Sequence
from functools import partial

import grpc

from proa.addresses import host_and_port
from proa_gateway.keep_running import keep_running
from proa_gateway.scaler.demand import Demand
from proa_gateway.scaler.v1 import waiting_pb2, waiting_pb2_grpc

RESOLVE_INTERVAL = 5.0  # seconds between two looks for new gateways
RETRY_INTERVAL = 1.0
CHANNEL_OPTIONS = (
    # A node that loses power sends no FIN: its requests must not be counted for long.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 5000),
    ("grpc.http2.ping_timeout_ms", 5000),
    ("grpc.http2.max_pings_without_data", 0),  # while nothing waits, streams have no messages
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),  # each attempt opens a new connection
)
_log = logging.getLogger(__name__)


async def follow_peers(names: Sequence[str], own_name: str, demand: Demand) -> None:
    """Keep `demand` up to date until cancelled. `names`: HOST:PORT each; all addresses of a host are gateways. One of
    them may be this gateway, which calls itself `own_name`: it is left out."""
    addresses: dict[str, set[str]] = {name: set() for name in names}
    streams: dict[str, asyncio.Task[None]] = {}
    try:
        while True:
            for name in names:
                addresses[name] = await _resolve(name, addresses[name])
            found = set().union(*addresses.values())
            for address in found - streams.keys():
                follow = keep_running(f"following gateway {address}", partial(_follow, address, own_name, demand))
                streams[address] = asyncio.create_task(follow, name=f"peer {address}")
            for address in streams.keys() - found:
                streams.pop(address).cancel()
            await asyncio.sleep(RESOLVE_INTERVAL)
    finally:
        for stream in streams.values():
            stream.cancel()
        await asyncio.gather(*streams.values(), return_exceptions=True)


async def _resolve(name: str, before: set[str]) -> set[str]:
    """The addresses, HOST:PORT, of a name: those `before` while no name server answers, which says nothing of the
    gateways."""
    host, port = name.rsplit(":", 1)
    try:
        infos = await asyncio.get_running_loop().getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError as error:  # with another number than this one no gateway is listed yet
        _log.debug("gateways at %s: %s", name, error)
        return before if error.errno == socket.EAI_AGAIN else set()
    return {host_and_port(str(info[4][0]), port) for info in infos}


async def _follow(address: str, own_name: str, demand: Demand) -> None:
    """Follow one gateway until cancelled. Returns if it is this one."""
    while True:
        name = ""
        try:
            async with grpc.aio.insecure_channel(address, options=CHANNEL_OPTIONS) as channel:
                stub = waiting_pb2_grpc.WaitingServiceStub(channel)
                async for message in stub.Watch(waiting_pb2.WatchRequest()):
                    name = message.gateway
                    if name == own_name:
                        return
                    demand.set_elsewhere(name, dict(message.waiting))
        except grpc.aio.AioRpcError as error:
            _log.debug("gateway %s: %s", address, error.details())
        finally:
            demand.forget(name)
        await asyncio.sleep(RETRY_INTERVAL)
