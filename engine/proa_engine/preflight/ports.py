"""Whether this process can listen on an address, and the reason if it cannot."""

import errno
import socket

_REASONS = {
    errno.EADDRINUSE: "another program listens there",
    errno.EADDRNOTAVAIL: "{host} is not an address of this machine",
    errno.EACCES: "ports below 1024 need a privilege",
}


def why_unusable(host: str, port: int) -> str | None:
    """Return why a program cannot listen on the address; None if it can. An empty host: all addresses."""
    try:
        found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (socket.gaierror, UnicodeError):
        return f"{host} is neither an address nor a name that can be resolved"
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(address)
            listener.listen(1)  # only this fails while another program listens with SO_REUSEADDR
        except OSError as error:
            reason = _REASONS.get(error.errno or 0)
            return (error.strerror or str(error)) if reason is None else reason.format(host=host)
    return None


def check_address(host: str, port: int, flag: str) -> None:
    """Raise ValueError, naming the flag, if this process cannot listen there. Port 0, any free one, is not checked."""
    if port and (reason := why_unusable(host, port)) is not None:
        raise ValueError(f"cannot listen on {host}:{port} ({flag}): {reason}")
