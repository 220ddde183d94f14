"""The interface with the route to an address."""

import socket

import pytest

from proa_engine.ranks.interfaces import interface_to


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.5", "::1"])
def test_this_machine_is_reached_through_the_loopback_interface(host: str) -> None:
    if host == "::1" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    assert interface_to(host) == "lo"
