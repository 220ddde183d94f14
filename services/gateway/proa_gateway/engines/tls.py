"""Channels to engines under mutual TLS. The files are read for each connection, so new ones need no restart."""

from collections.abc import Callable, Sequence
from typing import Any

import grpc

from proa.tls import TlsSource

ChannelOptions = Sequence[tuple[str, Any]]
OpenChannel = Callable[[str, ChannelOptions], grpc.aio.Channel]
"""Takes an address and options."""


class TlsChannels:
    """Opens channels. Engines are reached by IP address, so their certificates are all for one fixed name."""

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
