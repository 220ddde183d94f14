"""A lost engine's streams are logged together, not one by one."""

import asyncio
import logging

import pytest

from proa_gateway.engines.failover_log import FailoverLog


@pytest.fixture(autouse=True)
def level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="proa_gateway.engines.failover_log")


async def test_streams_that_move_together_are_one_line_for_each_engine_that_continues_them(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailoverLog(seconds=0.02)
    for engine in ("b:1", "b:1", "c:1"):
        log.record_resumed("a:1", engine)
    assert caplog.messages == []
    async with asyncio.timeout(10):
        while not caplog.messages:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    assert caplog.messages == ["resumed 2 streams of a:1 on b:1", "resumed 1 stream of a:1 on c:1"]
    assert vars(caplog.records[0])["proa_fields"] == {"lost_engine": "a:1", "engine": "b:1", "num_streams": 2}


async def test_the_next_loss_is_counted_anew(caplog: pytest.LogCaptureFixture) -> None:
    log = FailoverLog()
    for count in (1, 2):
        for _ in range(count):
            log.record_resumed("a:1", "b:1")
        log.flush()
    log.flush()
    assert caplog.messages == ["resumed 1 stream of a:1 on b:1", "resumed 2 streams of a:1 on b:1"]


async def test_streams_that_no_engine_continues_are_a_warning_with_their_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    log = FailoverLog()
    for _ in range(3):
        log.record_given_up("a:1", "the engine was lost: no message for 10.0 s")
    log.flush()
    (record,) = caplog.records
    assert (record.levelname, record.getMessage()) == (
        "WARNING",
        "gave up 3 streams of a:1: the engine was lost: no message for 10.0 s",
    )
