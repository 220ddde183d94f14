"""Sources: the addresses of engines from which blocks may be fetched.

What a source sends is kept and used for other requests, so a request cannot name any source that it likes: it must be
one that the operator has listed. A name that is not listed is not even resolved.
"""

import socket
import time
from collections.abc import Callable, Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network
from threading import Condition, Thread

_FRESH_SECONDS = 10.0  # in which the addresses of names are used without resolving the names again
_RETRY_SECONDS = 1.0  # from one resolution to the next, if an address is not among them
_RESOLVE_SECONDS = 2.0  # for which a fetch waits for one

Resolve = Callable[[str], Sequence[str]]


def resolve(name: str) -> list[str]:
    """Return the addresses of a name. Raises `OSError`."""
    found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(address[0]) for *_, address in found))


class Sources:
    """Networks, addresses and names. Names are resolved when they are needed, on a thread of its own, because that has
    no timeout. Thread-safe."""

    def __init__(
        self, entries: Sequence[str], *, resolve: Resolve = resolve, clock: Callable[[], float] = time.monotonic
    ) -> None:
        networks = {entry: _network(entry) for entry in entries}
        self._networks = [network for network in networks.values() if network is not None]
        self._resolve = resolve
        self._clock = clock
        self._changed = Condition()
        self._names: dict[str, Sequence[str]] = {
            entry.lower(): () for entry, network in networks.items() if network is None
        }
        self._resolved_at = float("-inf")
        self._is_resolving = False

    def addresses_of(self, host: str) -> Sequence[str]:
        """Return the addresses to connect to for the host of a source, in the order in which to try them. Empty: it is
        not a source, or a name without an address."""
        address = _address(host)
        if address is None and host.lower() not in self._names:
            return ()
        if address is not None and any(address in network for network in self._networks):
            return (str(address),)
        if not self._names:
            return ()
        with self._changed:
            known = self._known(host.lower(), address)
            if self._clock() - self._resolved_at >= (_FRESH_SECONDS if known else _RETRY_SECONDS):
                self._resolve_all()
                known = self._known(host.lower(), address)
            return known

    def _known(self, host: str, address: IPv4Address | IPv6Address | None) -> Sequence[str]:
        if address is None:
            return self._names[host]
        return (str(address),) if any(str(address) in found for found in self._names.values()) else ()

    def _resolve_all(self) -> None:
        """Resolve all names, with the lock, and wait for it for a while."""
        if not self._is_resolving:
            try:
                Thread(target=self._run, name="proa-mover-resolve", daemon=True).start()
            except RuntimeError:  # the container's limit of threads is reached
                return
            self._is_resolving = True
        self._changed.wait_for(lambda: not self._is_resolving, _RESOLVE_SECONDS)

    def _run(self) -> None:
        found: dict[str, Sequence[str]] = {}
        for name in self._names:
            try:
                found[name] = [str(_address(each) or each) for each in self._resolve(name)]
            except (OSError, UnicodeError):  # the addresses that it had are kept
                continue
        with self._changed:
            self._names |= found
            self._resolved_at = self._clock()
            self._is_resolving = False
            self._changed.notify_all()


def _network(entry: str) -> IPv4Network | IPv6Network | None:
    """Return the network that an entry is, None if it is a name."""
    try:
        return ip_network(entry, strict=False)
    except ValueError:
        return None


def _address(host: str) -> IPv4Address | IPv6Address | None:
    try:
        address = ip_address(host)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address
