"""Streams over TCP: both directions at once over TLS, options of sockets, deadlines."""

import random
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import msgspec
import pytest

from proa_engine.config import PeerTls
from proa_engine.framing import FrameReader, Stream, encode, receive
from proa_engine.ranks.tcp import SILENT_SECONDS, deadline, open_stream
from proa_engine.tls import Plaintext, Tls
from support.certificates import signed

LARGE = 8 << 20  # bytes, more than the buffers of a connection hold
DEADLINE = 30.0


class Message(msgspec.Struct):
    number: int
    content: bytes = b""


DECODER = msgspec.msgpack.Decoder(Message)


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Tls:
    made = signed(tmp_path_factory.mktemp("certificates") / "one")
    return Tls(PeerTls(str(made.certificate), str(made.key), str(made.authority)))


def connected() -> tuple[socket.socket, socket.socket]:
    """The two sides of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = socket.create_connection(listener.getsockname())
        return first, listener.accept()[0]


@contextmanager
def streams(tls: Tls | Plaintext) -> Iterator[tuple[Stream, Stream]]:
    first, second = connected()
    with ThreadPoolExecutor(1) as pool:
        accepting = pool.submit(open_stream, second, tls.accept)
        opened = open_stream(first, tls.connect), accepting.result(DEADLINE)
    try:
        yield opened
    finally:
        for stream in opened:
            stream.close()


def send_all(stream: Stream, contents: list[bytes]) -> None:
    for number, content in enumerate(contents):
        stream.sendall(encode(Message(number, content)))


def read_all(stream: Stream, count: int) -> list[bytes]:
    reader: FrameReader[Message] = FrameReader(stream, DECODER)
    messages = [reader.read() for _ in range(count)]
    reader.close()
    return [message.content for message in messages if message is not None]


@pytest.mark.parametrize("with_tls", [False, True])
def test_both_sides_send_and_read_at_once(tls: Tls, with_tls: bool) -> None:
    generator = random.Random(3)
    contents = [generator.randbytes(size) for size in (1, 70_000, LARGE, 0, 100)]
    with streams(tls if with_tls else Plaintext()) as (first, second), ThreadPoolExecutor(4) as pool:
        reads = [pool.submit(read_all, stream, len(contents)) for stream in (first, second)]
        for done in [pool.submit(send_all, stream, contents) for stream in (first, second)]:
            done.result(DEADLINE)
        assert [read.result(DEADLINE) for read in reads] == [contents, contents]


@pytest.mark.parametrize("with_tls", [False, True])
def test_the_end_of_a_stream_reaches_a_thread_that_reads(tls: Tls, with_tls: bool) -> None:
    with streams(tls if with_tls else Plaintext()) as (first, second), ThreadPoolExecutor(2) as pool:
        reading = pool.submit(FrameReader(first, DECODER).read)
        first.sendall(encode(Message(1)))
        assert FrameReader(second, DECODER).read() == Message(1)
        second.shutdown(socket.SHUT_WR)
        assert reading.result(DEADLINE) is None


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_stream_that_is_shut_down_here_ends_its_reader(tls: Tls, with_tls: bool) -> None:
    with streams(tls if with_tls else Plaintext()) as (first, _), ThreadPoolExecutor(1) as pool:
        reading = pool.submit(FrameReader(first, DECODER).read)
        first.shutdown(socket.SHUT_RDWR)
        first.close()
        assert reading.result(DEADLINE) is None


def test_a_closed_tls_stream_cannot_be_used(tls: Tls) -> None:
    with streams(tls) as (first, _):
        first.close()
        with pytest.raises(OSError, match="the connection is closed"):
            first.sendall(b"late")
        first.close()


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (encode(Message(1, bytes(100))), "a message of 1\\d\\d bytes, at most 64 are expected"),
        (b"\x01\0\0\0\xc1", "MessagePack data is malformed"),
        (b"\x01\0\0\0\x01", "Expected `object`, got `int`"),
    ],
)
def test_a_message_of_an_unknown_peer_is_limited(sent: bytes, error: str) -> None:
    with streams(Plaintext()) as (first, second):
        first.sendall(encode(Message(7)))
        assert receive(second, DECODER, max_bytes=64) == Message(7)
        first.sendall(sent)
        with pytest.raises(ValueError, match=error):
            receive(second, DECODER, max_bytes=64)


def test_a_connection_that_ends_before_a_message_is_an_error() -> None:
    with streams(Plaintext()) as (first, second):
        first.sendall(b"\x05\0")
        first.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match="the connection was closed"):
            receive(second, DECODER, max_bytes=64)


def test_a_machine_that_does_not_answer_ends_the_connection() -> None:
    first, second = connected()
    with first, second:
        open_stream(first, Plaintext().connect)
        options = {
            name: first.getsockopt(socket.IPPROTO_TCP, getattr(socket, name))
            for name in ("TCP_NODELAY", "TCP_KEEPIDLE", "TCP_KEEPINTVL", "TCP_USER_TIMEOUT")
        }
        assert first.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert options["TCP_NODELAY"]
    assert options["TCP_USER_TIMEOUT"] == 1000 * SILENT_SECONDS
    assert options["TCP_KEEPIDLE"] + options["TCP_KEEPINTVL"] < SILENT_SECONDS


def receive_within(seconds: float, connection: socket.socket, tls: Tls | Plaintext) -> None:
    with deadline(connection, seconds):
        stream = open_stream(connection, tls.accept)
        receive(stream, DECODER, max_bytes=64)


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_deadline_ends_a_block_that_waits_for_the_peer(tls: Tls, with_tls: bool) -> None:
    first, second = connected()
    started = time.monotonic()
    with first, second, pytest.raises(OSError, match=r"closed|EOF"):
        receive_within(0.1, first, tls if with_tls else Plaintext())
    assert time.monotonic() - started < DEADLINE


def test_a_block_that_ends_in_time_keeps_its_connection() -> None:
    first, second = connected()
    with first, second:
        with deadline(first, DEADLINE):
            pass
        first.sendall(b"x")
        assert second.recv(1) == b"x"


@pytest.mark.parametrize("with_tls", [False, True])
def test_a_reset_connection_ends_for_its_reader_after_what_was_sent(tls: Tls, with_tls: bool) -> None:
    with streams(tls if with_tls else Plaintext()) as (first, second):
        reader: FrameReader[Message] = FrameReader(second, DECODER)
        first.sendall(encode(Message(1)) * 2)
        assert reader.read() == Message(1)
        second.sendall(b"unread")
        first.close()  # resets the connection, since it has not read all
        assert reader.read() == Message(1)
        assert reader.read() is None
        reader.close()
