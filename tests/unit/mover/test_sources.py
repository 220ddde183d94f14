"""From where blocks are fetched: from engines that the operator has listed, and from no other address."""

import socket
from collections.abc import Sequence
from threading import Event

import pytest

from proa_engine.mover.sources import Sources, resolve
from proa_engine.option_groups import LOOPBACK
from support.movers import hashes, make_job, running_mover

SERVICE = "proa-engine.here"


class Names:
    """Name servers. `now` is the time."""

    def __init__(self, **addresses: Sequence[str]) -> None:
        self.addresses = {"proa-engine.here": ["10.0.0.1", "10.0.0.2"], **addresses}
        self.asked: list[str] = []
        self.now = 100.0

    def resolve(self, name: str) -> Sequence[str]:
        self.asked.append(name)
        if name not in self.addresses:
            raise OSError("Name or service not known")
        return self.addresses[name]

    def sources(self, *entries: str) -> Sources:
        return Sources(entries, resolve=self.resolve, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("entries", "host", "is_source"),
    [
        (LOOPBACK, "127.0.0.1", True),
        (LOOPBACK, "127.8.9.10", True),
        (LOOPBACK, "::1", True),
        (LOOPBACK, "::ffff:127.0.0.1", True),
        (LOOPBACK, "10.0.0.1", False),
        (LOOPBACK, "0.0.0.0", False),
        (LOOPBACK, "::", False),
        (["10.1.0.0/16"], "10.1.2.3", True),
        (["10.1.0.0/16"], "10.2.0.1", False),
        (["10.1.0.0/16"], "127.0.0.1", False),
        (["10.1.2.3/16"], "10.1.0.1", True),
        (["10.1.2.3"], "10.1.2.3", True),
        (["10.1.2.3"], "10.1.2.4", False),
        (["fd00::/8"], "fd12::1", True),
        (["fd00::/8"], "10.1.2.3", False),
        ([SERVICE], SERVICE, True),
        ([SERVICE], SERVICE.upper(), True),
        ([SERVICE], "10.0.0.2", True),
        ([SERVICE], "10.0.0.3", False),
        ([SERVICE], "2130706433", False),  # 127.0.0.1 as inet_aton reads it
        ([SERVICE], "", False),
        ([], "127.0.0.1", False),
    ],
)
def test_only_what_is_listed_is_a_source(entries: Sequence[str], host: str, is_source: bool) -> None:
    assert bool(Names(localhost=["127.0.0.1"]).sources(*entries).addresses_of(host)) is is_source


def test_a_name_that_is_not_listed_is_not_resolved() -> None:
    names = Names(**{"attacker.test": ["10.0.0.1"]})
    sources = names.sources(SERVICE, "10.0.0.0/8")
    assert not sources.addresses_of("attacker.test")
    assert not sources.addresses_of(f"{SERVICE}.attacker.test")
    assert not names.asked


def test_an_engine_that_started_later_is_found() -> None:
    names = Names()
    sources = names.sources(SERVICE)
    assert not sources.addresses_of("10.0.0.3")
    names.addresses[SERVICE] = ["10.0.0.3"]
    names.now += 1.0
    assert sources.addresses_of("10.0.0.3") == ("10.0.0.3",)


def test_strangers_do_not_make_the_engine_ask_name_servers_all_the_time() -> None:
    names = Names()
    sources = names.sources(SERVICE)
    for _ in range(100):
        names.now += 0.001
        assert not sources.addresses_of("10.0.0.9")
        assert sources.addresses_of("10.0.0.1")
    assert names.asked == [SERVICE]


def test_an_address_that_a_name_has_lost_is_no_source_any_more() -> None:
    names = Names()
    sources = names.sources(SERVICE)
    assert sources.addresses_of("10.0.0.1")
    names.addresses[SERVICE] = ["10.0.0.2"]
    names.now += 10.0
    assert not sources.addresses_of("10.0.0.1")


def test_addresses_are_kept_while_name_servers_do_not_answer() -> None:
    names = Names()
    sources = names.sources(SERVICE)
    assert sources.addresses_of("10.0.0.1")
    del names.addresses[SERVICE]
    names.now += 1000.0
    assert sources.addresses_of("10.0.0.1")


def test_a_name_server_that_hangs_does_not_hold_a_fetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("proa_engine.mover.sources._RESOLVE_SECONDS", 0.01)
    answers = Event()

    def hang(name: str) -> Sequence[str]:
        answers.wait()
        return ["10.0.0.1"]

    sources = Sources([SERVICE], resolve=hang)
    assert not sources.addresses_of("10.0.0.1")
    answers.set()
    with sources._changed:
        assert sources._changed.wait_for(lambda: not sources._is_resolving, 20)
    assert sources.addresses_of("10.0.0.1")


def test_a_name_has_all_its_addresses() -> None:
    assert {"127.0.0.1", "::1"} & {*resolve("localhost")}
    assert Names().sources(SERVICE).addresses_of(SERVICE) == ["10.0.0.1", "10.0.0.2"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_blocks_come_from_an_address_of_a_name_that_is_listed(host: str) -> None:
    with running_mover() as source, running_mover(sources=["localhost"]) as target:
        source.store(hashes(3))
        target.fetch(make_job(f"{host}:{source.port}", hashes(3)))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.error) == (3, "")


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_blocks_of_a_stranger_are_not_kept_and_it_is_not_connected_to(host: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as stranger, running_mover(sources=[SERVICE]) as target:
        target.fetch(make_job(f"{host}:{stranger.getsockname()[1]}", hashes(3)))
        fetched = target.fetched()
        assert (fetched.num_blocks, fetched.error) == (0, "there is no connection to the source")
        stranger.settimeout(0.05)
        with pytest.raises(TimeoutError):
            stranger.accept()


def test_errors_do_not_tell_what_is_at_an_address() -> None:
    """Whoever may send requests must not learn which addresses and names exist."""
    with socket.create_server(("127.0.0.1", 0)) as closed:
        refused = f"127.0.0.1:{closed.getsockname()[1]}"
    with running_mover(sources=["127.0.0.1", "no-such-name.invalid"]) as target:
        addresses = (refused, "no-such-name.invalid:1", "unlisted.invalid:1", "127.0.0.2:1", "127.0.0.1:0", "nothing")
        errors = set()
        for job_id, address in enumerate(addresses):
            target.fetch(make_job(address, hashes(1), job_id=job_id))
            errors.add(target.fetched().error)
        assert errors == {"there is no connection to the source"}
        logged = "\n".join(target.lines)
        assert "refused" in logged, "the operator learns it"
        assert "--kv-transfer-sources" in logged


def test_strangers_do_not_fill_the_log() -> None:
    with running_mover() as target:
        for job_id in range(10):
            target.fetch(make_job(f"10.0.0.{job_id}:1", hashes(1), job_id=job_id))
            target.fetched()
        assert len(target.lines) == 1
