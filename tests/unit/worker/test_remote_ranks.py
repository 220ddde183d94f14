"""Node 0 accepts the ranks of its other nodes, and refuses all other peers with a reason."""

import select
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.options import flat
from proa_engine.config import EngineConfig, PeerTls
from proa_engine.executor import remote_ranks
from proa_engine.executor.remote_ranks import RemoteRanks
from proa_engine.framing import Stream
from proa_engine.option_groups import Parallel
from proa_engine.ranks.connect import NodeRank, RankRefused, connect
from proa_engine.ranks.handshake import make_hello
from support.certificates import Certificate, signed
from support.processes import free_port

DEADLINE = 30.0
CONFIG = EngineConfig(model="m", parallel=Parallel(tensor_parallel_size=4, nnodes=2, master_addr="127.0.0.1"))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[PeerTls, PeerTls]:
    """The files of two certificates, each of an authority of its own."""
    folder = tmp_path_factory.mktemp("certificates")
    return files_of(signed(folder / "first")), files_of(signed(folder / "second"))


def files_of(made: Certificate) -> PeerTls:
    return PeerTls(str(made.certificate), str(made.key), str(made.authority))


class Node0:
    """Node 0's listener, and what it has logged."""

    def __init__(self, config: EngineConfig) -> None:
        self.lines: list[str] = []
        self.config = config
        self.ranks = RemoteRanks(config, self.lines.append)

    def connect(self, rank: int = 2, tls: PeerTls | None = None, **fields: Any) -> Stream:
        """Connect as a rank of a node with these fields in its configuration."""
        hello = make_hello(EngineConfig.from_options(**flat(self.config) | fields), rank)
        return connect(
            NodeRank(hello, "127.0.0.1", self.config.parallel.master_port, tls or self.config.peer_tls), print
        )

    def take(self, rank: int = 2) -> Stream:
        deadline = time.monotonic() + DEADLINE
        while (stream := self.ranks.take(rank)) is None:
            assert time.monotonic() < deadline, "the rank is not accepted"
            time.sleep(0.01)
        return stream

    def wait_for_line(self, text: str) -> None:
        deadline = time.monotonic() + DEADLINE
        while not any(text in line for line in self.lines):
            assert time.monotonic() < deadline, self.lines
            time.sleep(0.01)


@contextmanager
def node_0(**fields: Any) -> Iterator[Node0]:
    node = Node0(EngineConfig.from_options(**flat(CONFIG) | {"master_port": free_port()} | fields))
    with closing(node.ranks):
        yield node


def assert_accepts_rank_2(node: Node0) -> None:
    with closing(node.connect()) as theirs, closing(node.take()) as ours:
        theirs.sendall(b"there")
        assert ours.recv(5) == b"there"
        ours.sendall(b"here")
        assert theirs.recv(4) == b"here"


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_rank_of_another_node_is_accepted(made: tuple[PeerTls, PeerTls], with_tls: bool) -> None:
    with node_0(peer_tls=made[0] if with_tls else None) as node:
        assert node.ranks.describe(2) == "node 1"
        assert_accepts_rank_2(node)
        assert node.ranks.describe(2) == "node 1 at 127.0.0.1"
        assert node.ranks.local_address == "127.0.0.1"


def test_a_rank_waits_until_node_0_listens() -> None:
    lines: list[str] = []
    config = replace(CONFIG, parallel=replace(CONFIG.parallel, master_port=free_port()))
    rank = NodeRank(make_hello(config, 2), "127.0.0.1", config.parallel.master_port)

    def listen_once_logged(line: str) -> None:
        lines.append(line)
        nodes.append(Node0(config))

    nodes: list[Node0] = []
    connect(rank, listen_once_logged).close()

    assert lines == [f"waiting for node 0 at 127.0.0.1:{config.parallel.master_port}: Connection refused"]
    nodes[0].ranks.close()


@pytest.mark.parametrize(
    ("fields", "rank", "reason"),
    [
        ({"model": "other"}, 2, "model is other on its node and m on node 0: start all nodes with the same flags"),
        ({"tensor_parallel_size": 8}, 2, "num_ranks is 8 on its node and 4 on node 0"),
        ({"nnodes": 4}, 2, "nnodes is 4 on its node and 2 on node 0"),
        ({}, 1, "rank 1 is not on another node: those are 2 to 3"),
        ({}, 4, "rank 4 is not on another node: those are 2 to 3"),
    ],
)
def test_a_rank_of_another_engine_is_refused_on_both_sides(fields: dict[str, Any], rank: int, reason: str) -> None:
    with node_0() as node:
        with pytest.raises(RankRefused, match=f"node 0 at .* refuses rank {rank}: {reason}"):
            node.connect(rank, **fields)
        node.wait_for_line(f"refused a connection from 127.0.0.1 to port {node.config.parallel.master_port}: {reason}")
        assert_accepts_rank_2(node)


def test_a_rank_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with node_0() as node:
        hello = make_hello(node.config, 2)
        monkeypatch.setattr("proa_engine.ranks.handshake.version", lambda _: "9.9")
        with pytest.raises(RankRefused, match=f"version is {hello.version} on its node and 9.9 on node 0"):
            connect(NodeRank(hello, "127.0.0.1", node.config.parallel.master_port), print)


@pytest.mark.parametrize("is_taken", [False, True])
def test_a_second_connection_of_a_rank_is_refused_and_the_first_stays(is_taken: bool) -> None:
    with node_0() as node, closing(node.connect()) as theirs:
        if is_taken:
            ours = node.take()
        with pytest.raises(RankRefused, match=r"rank 2 is connected already, from 127\.0\.0\.1"):
            node.connect()
        if not is_taken:
            ours = node.take()
        with closing(ours):
            theirs.sendall(b"there")
            assert ours.recv(5) == b"there"


def test_node_0_refuses_a_rank_without_its_authoritys_certificate(made: tuple[PeerTls, PeerTls]) -> None:
    ours, theirs = made
    believes_us = replace(theirs, authority_file=ours.authority_file)
    with node_0(peer_tls=ours) as node:
        with pytest.raises(RankRefused, match=r"no TLS connection to node 0 at .*alert unknown ca"):
            node.connect(tls=believes_us)
        node.wait_for_line("refused a connection from 127.0.0.1")
        assert_accepts_rank_2(node)


def test_a_rank_does_not_believe_a_node_0_of_another_authority(made: tuple[PeerTls, PeerTls]) -> None:
    with (
        node_0(peer_tls=made[0]) as node,
        pytest.raises(RankRefused, match=r"no TLS connection to node 0 at .*certificate verify failed"),
    ):
        node.connect(tls=made[1])


def test_a_rank_in_plaintext_is_refused_by_a_node_0_with_tls(made: tuple[PeerTls, PeerTls]) -> None:
    with node_0(peer_tls=made[0]) as node:
        plaintext = NodeRank(make_hello(node.config, 2), "127.0.0.1", node.config.parallel.master_port)
        with pytest.raises(RankRefused, match="node 0 demands TLS: give --tls-cert"):
            connect(plaintext, print)
        assert_accepts_rank_2(node)


def test_a_rank_with_tls_is_refused_by_a_node_0_in_plaintext(made: tuple[PeerTls, PeerTls]) -> None:
    with node_0() as node:
        with pytest.raises(RankRefused, match="no TLS connection to node 0 at "):
            node.connect(tls=made[0])
        assert_accepts_rank_2(node)


@pytest.mark.parametrize("sent", [b"GET / HTTP/1.1\r\n\r\n", struct.pack("<I", 3) + b"\xff\xff\xff", b"\0\0", b""])
def test_a_peer_that_is_no_rank_is_logged_once_and_does_no_harm(sent: bytes) -> None:
    with node_0() as node:
        for _ in range(3):
            with socket.create_connection(("127.0.0.1", node.config.parallel.master_port), DEADLINE) as peer:
                peer.sendall(sent)
                peer.shutdown(socket.SHUT_WR)
                while peer.recv(4096):
                    pass
        assert_accepts_rank_2(node)
        assert len([line for line in node.lines if line.startswith("refused a connection from 127.0.0.1")]) == 1


@pytest.mark.parametrize("with_tls", [False, True])
def test_peers_that_say_nothing_are_dropped_and_delay_no_rank(
    made: tuple[PeerTls, PeerTls], with_tls: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_ranks, "SECONDS", 1.0)
    with node_0(peer_tls=made[0] if with_tls else None) as node:
        peers = [socket.create_connection(("127.0.0.1", node.config.parallel.master_port), DEADLINE) for _ in range(8)]
        assert_accepts_rank_2(node)
        for peer in peers:
            with peer:
                assert not peer.recv(1), "the connection is closed"
        node.wait_for_line("it ended, or took longer than")


def test_peers_that_say_nothing_give_way_to_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_ranks, "_MAX_HANDSHAKES", 4)
    monkeypatch.setattr(remote_ranks, "SECONDS", 1000.0)
    with node_0() as node, ExitStack() as stack:
        port = node.config.parallel.master_port
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", port), DEADLINE)) for _ in range(8)]
        assert_accepts_rank_2(node)
        closed: set[socket.socket] = set()
        while len(closed) < 4:  # each peer's turn comes when its thread runs
            readable, _, _ = select.select([each for each in peers if each not in closed], [], [], DEADLINE)
            assert readable
            closed |= {each for each in readable if not each.recv(1)}


def test_a_port_in_use_is_named_with_its_flag() -> None:
    with (
        node_0() as node,
        pytest.raises(ValueError, match=rf"port {node.config.parallel.master_port} \(--master-port\): "),
    ):
        RemoteRanks(node.config, print)


def test_plaintext_is_logged_unless_all_nodes_are_on_this_machine(made: tuple[PeerTls, PeerTls]) -> None:
    for fields, is_logged in (
        ({"master_addr": "10.0.0.1"}, True),
        ({"master_addr": "engine-0.engine"}, True),
        ({"master_addr": "10.0.0.1", "peer_tls": made[0]}, False),
        ({"master_addr": "localhost"}, False),
    ):
        with node_0(**fields) as node:
            assert any("plaintext" in line for line in node.lines) == is_logged


def test_an_invalid_tls_file_is_named(tmp_path: Path) -> None:
    missing = PeerTls(*3 * (str(tmp_path / "missing.crt"),))
    with pytest.raises(ValueError, match=r"cannot read .*missing\.crt"):
        RemoteRanks(replace(CONFIG, peer_tls=missing), print)
