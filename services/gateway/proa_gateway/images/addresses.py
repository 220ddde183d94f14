"""Which addresses are public: a gateway must not fetch from the network that it runs in."""

from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address

# Named here where versions of Python differ. https://www.iana.org/assignments/iana-ipv4-special-registry
_SPECIAL_IPV4 = [
    IPv4Network("100.64.0.0/10"),  # shared by carriers
    IPv4Network("192.0.0.0/24"),
    IPv4Network("192.88.99.0/24"),  # relays of 6to4
]
_GLOBAL_UNICAST = IPv6Network("2000::/3")  # outside: IPv4-mapped, NAT64, link-local, unique local, multicast, …
_SPECIAL_IPV6 = [
    IPv6Network("2001::/23"),  # Teredo, …
    IPv6Network("2001:db8::/32"),
    IPv6Network("2002::/16"),  # 6to4
    IPv6Network("3fff::/20"),
]


def is_public(address: str) -> bool:
    """Raises `ValueError` for what is no address."""
    parsed = ip_address(address)
    return _is_public_ipv4(parsed) if isinstance(parsed, IPv4Address) else _is_public_ipv6(parsed)


def _is_public_ipv4(address: IPv4Address) -> bool:
    if address.is_multicast or address.is_reserved or any(address in network for network in _SPECIAL_IPV4):
        return False
    return address.is_global


def _is_public_ipv6(address: IPv6Address) -> bool:
    if address not in _GLOBAL_UNICAST or any(address in network for network in _SPECIAL_IPV6):
        return False
    return address.is_global
