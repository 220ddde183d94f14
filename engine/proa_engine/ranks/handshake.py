"""The first messages between node 0 and a rank of another node.

The rank sends Hello. Node 0 answers with Welcome, after which the connection carries the messages of `wire`, or with
Refused.
"""

from collections.abc import Mapping
from importlib.metadata import version

import msgspec

from proa_engine.config import EngineConfig

MAX_BYTES = 4096  # of each of these messages
SECONDS = 10.0  # from the connection to the answer, the TLS handshake included


class Hello(msgspec.Struct, tag=True, frozen=True):
    """What a rank is. All but the rank must be the same on node 0."""

    rank: int
    version: str
    model: str
    num_ranks: int
    nnodes: int


class Welcome(msgspec.Struct, tag=True, frozen=True):
    """Node 0 has accepted the rank."""


class Refused(msgspec.Struct, tag=True, frozen=True):
    """Node 0 does not accept the rank, and closes the connection."""

    reason: str


Answer = Welcome | Refused
hello_decoder = msgspec.msgpack.Decoder(Hello)
answer_decoder: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def make_hello(config: EngineConfig, rank: int) -> Hello:
    # Messages between engine and worker change with any version, so theirs is that of the program.
    return Hello(rank, version("proa-engine"), config.model, config.parallel.num_ranks, config.parallel.nnodes)


def refusal(hello: Hello, config: EngineConfig, connected: Mapping[int, str]) -> str | None:
    """Return why node 0, with this configuration, does not accept the rank; None if it does. `connected`: addresses of
    the other nodes' ranks that are connected, by rank."""
    ours = make_hello(config, hello.rank)
    for field in ("version", "model", "nnodes", "num_ranks"):
        if (theirs := getattr(hello, field)) != (expected := getattr(ours, field)):
            return f"{field} is {theirs} on its node and {expected} on node 0: start all nodes with the same flags"
    first, last = config.parallel.ranks_per_node, config.parallel.num_ranks - 1
    if not first <= hello.rank <= last:
        return f"rank {hello.rank} is not on another node: those are {first} to {last}"
    if hello.rank in connected:
        return f"rank {hello.rank} is connected already, from {connected[hello.rank]}"
    return None
