"""Addresses of a server that is measured."""

import ipaddress
from urllib.parse import urlsplit


def base_url(host: str, port: int) -> str:
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def without_proxy(url: str) -> bool:
    """Whether the environment's proxies, which may not reach this machine, are not used: for loopback addresses."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
