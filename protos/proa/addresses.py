"""Addresses of servers."""

import ipaddress
from urllib.parse import urlsplit


def host_and_port(host: str, port: int | str) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback_url(url: str) -> bool:
    """Whether the URL's host is this machine, by a loopback address or as localhost."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
