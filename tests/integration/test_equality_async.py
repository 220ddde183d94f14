"""Asynchronous scheduling on a real executor: the next step is scheduled before this one's tokens are known."""

import time
from pathlib import Path
from threading import Event, Thread

import pytest

from proa.contract import SamplingParams
from support.engine import build_core, request
from support.tiny_models import make_tiny_model

DEADLINE = 30.0


@pytest.mark.parametrize("async_scheduling", [True, False])
def test_the_next_step_is_scheduled_while_the_device_computes_only_if_asynchronous(
    tmp_path: Path, async_scheduling: bool
) -> None:
    folder = make_tiny_model(tmp_path)
    with build_core(folder, max_model_len=64, async_scheduling=async_scheduling) as engine:
        gate = Event()
        engine.executor._device_thread.submit(lambda: gate.wait(DEADLINE))  # the device is busy until then
        params = SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)
        engine.core.submit(request("a", [1, 2, 3], params))
        stepper = Thread(target=lambda: [engine.core.step() for _ in range(2)])
        stepper.start()
        expected = 2 if async_scheduling else 1
        deadline = time.monotonic() + DEADLINE
        while len(engine.plans) < expected and time.monotonic() < deadline:
            time.sleep(0.01)
        stepper.join(0.2)
        assert stepper.is_alive(), "no step ends without the first one's tokens"
        assert len(engine.plans) == expected
        gate.set()
        stepper.join(DEADLINE)
        while engine.core.has_unfinished_requests():
            engine.core.step()
