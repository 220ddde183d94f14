"""The names under which a gateway without API keys answers: those of the header `Host`.

Without keys a gateway trusts whoever reaches its address, and the browser of a person in its network does. A web page
whose own name resolves to that address (DNS rebinding) is of the same origin for the browser, so that CORS does not
keep it from sending requests and reading the answers. But the header names the page's host, which no page can change.
"""

import ipaddress
import re
import socket
from collections.abc import Iterable

from proa_gateway.errors import HostNotAllowed

_PATTERN = re.compile(r"\*|(\*\.)?[a-z0-9_-]+(\.[a-z0-9_-]+)*")


def parse_host_pattern(text: str) -> str:
    """Raises `ValueError` for what is not a name, `*.` and a name, or `*`."""
    if not _PATTERN.fullmatch(text.lower()):
        raise ValueError(f"{text!r} is not a host name such as llm.example.com, *.example.com or *, without a port")
    return text.lower()


class AllowedHosts:
    """IP addresses, `localhost` and names without a dot, which the public DNS does not have, are always allowed."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """`patterns`: names, `*.` and a name for all names below it, or `*` for any."""
        self._names = {"localhost"}
        self._suffixes = [".localhost"]
        for pattern in patterns:
            if pattern.startswith("*"):
                self._suffixes.append(pattern[1:])  # of "*" the empty one
            else:
                self._names.add(pattern.lower())

    @classmethod
    def of_machine(cls, host: str, patterns: Iterable[str]) -> "AllowedHosts":
        """Also allows the name `host` on which the gateway listens, and this machine's own name."""
        own = socket.gethostname()
        return cls([host, own, f"{own}.local", *patterns])

    def check(self, header: str) -> None:
        """`header`: the header `Host`, empty if there is none: browsers always send it. Raises `HostNotAllowed`."""
        name = re.sub(r":[0-9]*$", "", header.strip()).rstrip(".").lower()
        if not (_is_address(name) or "." not in name or name in self._names or name.endswith(tuple(self._suffixes))):
            shown = name[:80]
            raise HostNotAllowed(
                f"The gateway does not answer under the name {shown!r}, which the request's header Host has. Start it "
                f"with --allowed-hosts {shown} (chart: gateway.allowedHosts), or with API keys, which make names "
                "irrelevant."
            )


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
