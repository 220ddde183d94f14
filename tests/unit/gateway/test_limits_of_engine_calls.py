"""The gateway waits longer for an engine's answer than the engine works on it."""

import pytest

from proa_engine.executor.uniproc import LORA_SECONDS
from proa_gateway.config import Deadlines
from proa_gateway.operators.calls import UNLOAD_SECONDS


@pytest.mark.parametrize(
    ("seconds", "work"),
    [
        (Deadlines().load_lora, LORA_SECONDS),
        (UNLOAD_SECONDS, 300.0),  # a step of a CPU, behind a long context
    ],
)
def test_a_call_may_take_as_long_as_its_work(seconds: float, work: float) -> None:
    assert seconds > work
