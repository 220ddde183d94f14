"""gRPC channels to engines, plaintext or with mutual TLS."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from proa.tls import TlsSource

ChannelOptions = Sequence[tuple[str, Any]]
OpenChannel = Callable[[str, ChannelOptions], grpc.aio.Channel]
"""Called with an engine's address, `host:port`."""

CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A node that loses power sends no FIN. gRPC's own threads send and answer these pings, however busy Python is on
    # either side, so an engine that is only late with its heartbeat is not taken for dead.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    # For gRPC's bandwidth probe pings: no keepalive ping is sent while one of these is unanswered.
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # Every attempt opens a new connection: the client decides when to reconnect, not a subchannel shared with an
    # earlier attempt.
    ("grpc.use_local_subchannel_pool", 1),
)


class TlsChannels:
    """Opens TLS channels. Reads the certificate files for each channel, so new ones need no restart.

    Engines are reached by IP address, so all their certificates are for one name, `server_name`.
    """

    def __init__(self, source: TlsSource, server_name: str) -> None:
        self._source = source
        self._server_name = server_name

    def __call__(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        identity = self._source.current()
        credentials = grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)
        named = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return grpc.aio.secure_channel(address, credentials, options=named)


def insecure_channels(address: str, options: ChannelOptions) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options)


def describe_error(error: BaseException) -> str:
    """Return one line about why a connection failed."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
