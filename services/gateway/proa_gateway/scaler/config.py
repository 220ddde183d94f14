"""ScalerOptions: the flags of KEDA's external scaler."""

import re
from dataclasses import dataclass

from proa.options import check_options, option

_ADDRESS = re.compile(r"([^/]+):([0-9]{1,5})")


def _address(text: str) -> str:
    match = _ADDRESS.fullmatch(text)
    if match is None or not 1 <= int(match[2]) <= 65535:
        raise ValueError(f"{text!r} is not HOST:PORT")
    try:
        match[1].encode("idna")
    except UnicodeError as error:  # which each look for its addresses would raise
        raise ValueError(f"{match[1]!r} is no host name: {error}") from error
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class ScalerOptions:
    """Raises `ValueError` for a value out of range."""

    scaler_port: int = option(
        0, "port on which KEDA learns how many requests there are, in plaintext; 0: none", minimum=0, maximum=65535
    )
    scaler_peers: tuple[str, ...] = option(
        (),
        "where other gateways have that port, whose waiting requests are counted too: a host name stands for all its "
        "addresses; repeat for several",
        metavar="HOST:PORT",
        parse=_address,
    )

    def __post_init__(self) -> None:
        check_options(self)
        if self.scaler_peers and not self.scaler_port:
            raise ValueError("--scaler-peers needs --scaler-port")
