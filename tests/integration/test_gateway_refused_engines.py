"""Engines that answer but cannot be used: they are tried again, and used as soon as they are repaired."""

import json
import logging
from typing import Any

import pytest

from proa_gateway import keep_running
from proa_gateway.engines import convert, models
from proa_gateway.engines.client import LAST_FAILED_DELAY, LAST_REFUSED_DELAY, ConnectAttempt
from support.fake_engine import FakeEngine, say, tokenizer_files
from support.gateway import RunningGateway, running_gateway, until
from support.scrape import Scrape


def port_of(engine: FakeEngine) -> int:
    return int(engine.address.rsplit(":")[1])


async def refused(gateway: RunningGateway) -> dict[str, float]:
    """The values of the metric of refused engines, by address."""
    page = Scrape((await gateway.http.get("/metrics")).text)
    samples = page.samples.items()
    return {dict(labels)["engine"]: value for (name, labels), value in samples if name == "proa_gateway_engine_refused"}


@pytest.mark.parametrize("error", [KeyError("name"), ExceptionGroup("two", [OSError("no"), OSError("yes")])])
async def test_an_engine_at_which_the_gateway_fails_is_used_after_its_restart(
    error: Exception, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = 0

    def fail(*_: Any) -> None:
        nonlocal attempts
        attempts += 1
        raise error

    monkeypatch.setattr(models, "Tokenizer", fail)
    async with FakeEngine(script=say("fine")) as engine, running_gateway(engine, ready=False) as gateway:
        port = port_of(engine)
        await until(lambda: attempts >= 2)
        (client,) = gateway.gateway.pool.engines
        assert client.refusal.startswith("the gateway failed: ")
        assert await refused(gateway) == {engine.address: 1}
        reports = [each for each in caplog.records if "engine not used" in each.message]
        assert [(each.levelno, each.exc_info is not None) for each in reports] == [(logging.WARNING, True)]

        monkeypatch.undo()
        await engine.stop()
        async with FakeEngine(script=say("fine")) as unstarted:
            await unstarted.stop()
            await unstarted.start(port)
            await until(lambda: client.usable)
            assert (await gateway.chat()).status_code == 200
            assert await refused(gateway) == {}


async def test_an_engine_with_a_bad_tokenizer_file_hurts_no_other_model_and_is_used_when_it_is_repaired() -> None:
    config = json.dumps({"chat_template": [{"template": "x"}]}).encode()
    broken = {**tokenizer_files(), "tokenizer_config.json": config, "tokenizer.json": b"{"}
    async with (
        FakeEngine(script=say("fine")) as healthy,
        FakeEngine(script=say("fine"), model_name="broken", files=broken) as engine,
        running_gateway(healthy, ready=False) as gateway,
    ):
        pool, port = gateway.gateway.pool, port_of(engine)
        pool.set_engines({each.address: each.address for each in (healthy, engine)})
        (client,) = (each for each in pool.engines if each.address == engine.address)
        await until(lambda: client.refusal)
        assert "tokenizer.json" in client.refusal
        await until(lambda: pool.ready)
        assert (await gateway.chat()).status_code == 200
        await engine.stop()
        repaired = FakeEngine(script=say("fine"), model_name="broken")
        await repaired.start(port)
        try:
            await until(lambda: client.usable)
            assert (await gateway.chat(model="broken")).status_code == 200
        finally:
            await repaired.stop()


async def test_an_engine_is_tried_again_where_its_process_cannot_be_watched(monkeypatch: pytest.MonkeyPatch) -> None:
    num_watches = 0

    async def fail(channel: Any) -> bool:
        nonlocal num_watches
        num_watches += 1
        raise KeyError("name")

    monkeypatch.setattr(convert, "wait_until_gone", fail)
    async with (
        FakeEngine(script=say("fine"), files={**tokenizer_files(), "tokenizer.json": b"{"}) as engine,
        running_gateway(engine, ready=False) as gateway,
    ):
        await until(lambda: num_watches >= 2)
        (client,) = gateway.gateway.pool.engines
        assert "tokenizer.json" in client.refusal


async def test_an_engine_is_used_after_its_client_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keep_running, "FIRST_PAUSE", 0.01)
    num_failures = 0

    def fail(attempt: ConnectAttempt, last: float) -> float:
        nonlocal num_failures
        num_failures += 1
        raise KeyError("name")

    async with FakeEngine(script=say("fine")) as engine, running_gateway(engine) as gateway:
        port, (client,) = port_of(engine), gateway.gateway.pool.engines
        with monkeypatch.context() as broken:
            broken.setattr(ConnectAttempt, "delay", fail)
            await engine.stop()
            await until(lambda: num_failures >= 2)
        again = FakeEngine(script=say("fine"))
        await again.start(port)
        try:
            await until(lambda: client.usable)
            assert (await gateway.chat()).status_code == 200
        finally:
            await again.stop()


async def test_an_engine_whose_tokenizer_never_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(convert, "MAX_TOKENIZER_BYTES", 2000)
    async with FakeEngine() as engine, running_gateway(engine, ready=False) as gateway:
        (client,) = gateway.gateway.pool.engines
        await until(lambda: client.refusal)
        assert client.refusal.startswith("tokenizer cannot be loaded: tokenizer.json and the files before it have more")


@pytest.mark.parametrize(
    ("attempt", "longest"),
    [
        (ConnectAttempt("no", is_refused=True), LAST_REFUSED_DELAY),
        (ConnectAttempt("bug", failure=KeyError()), LAST_FAILED_DELAY),
    ],
)
def test_the_pauses_grow_up_to_a_bound(attempt: ConnectAttempt, longest: float) -> None:
    pauses = [1.0]
    while len(pauses) < 12:
        pauses.append(attempt.delay(pauses[-1]))
    assert pauses[:4] == [1.0, 2.0, 4.0, 8.0]
    assert pauses[-1] == longest
