"""The network interface through which this machine reaches an address."""

import fcntl
import socket
import struct
from ipaddress import IPv6Address, ip_address
from pathlib import Path

_SIOCGIFADDR = 0x8915  # linux/sockios.h: the IPv4 address of an interface
_IFREQ = struct.Struct("16s24x")  # linux/if.h: a name, then a sockaddr
_ADDRESS = slice(20, 24)  # of the sockaddr_in in an ifreq
_IPV6_ADDRESSES = Path("/proc/net/if_inet6")  # lines of: address, index, prefix length, scope, flags, name


def interface_to(host: str) -> str | None:
    """Return the interface with the route to `host`, an IP address. None if its name cannot be determined: the route
    starts at one of several addresses of an interface."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((host, 9))  # sends nothing, only chooses the route
        own = ip_address(probe.getsockname()[0].partition("%")[0])
    return _ipv6_interface(own) if isinstance(own, IPv6Address) else _ipv4_interface(own.packed)


def _ipv4_interface(address: bytes) -> str | None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _SIOCGIFADDR, _IFREQ.pack(name.encode()))
            except OSError:  # it has no IPv4 address
                continue
            if answer[_ADDRESS] == address:
                return name
    return None


def _ipv6_interface(address: IPv6Address) -> str | None:
    for line in _IPV6_ADDRESSES.read_text().splitlines():
        packed, *_, name = line.split()
        if bytes.fromhex(packed) == address.packed:
            return name
    return None
