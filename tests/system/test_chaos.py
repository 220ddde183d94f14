"""The chaos run of `make chaos`, with one fault of three kinds."""

import signal

from benchmarks.http.chaos import Fault, prepared


async def test_no_answer_is_wrong_while_engines_and_gateways_are_killed() -> None:
    faults = (
        Fault("engine", 0, signal.SIGKILL, after=8),
        Fault("gateway", 1, signal.SIGKILL, after=8),
        Fault("engine", 1, signal.SIGTERM, after=8),
    )
    async with prepared() as chaos:
        tally = await chaos.run(faults, num_clients=12)
    assert tally.wrong == []
    assert tally.faults.total() == len(faults)
    assert tally.exact > 24
    assert tally.resumed > 0
    assert tally.cut > 0
