"""The engine loop, and the queue that takes its outputs to the I/O thread."""

import threading
import time
from collections.abc import Callable

from proa_engine.core.types import StepOutputs
from proa_engine.server.engine_loop import EngineLoop, OutputQueue
from support.core import CoreRun, make_request
from support.fake_grammar import fake_grammar


def step_outputs(step: int) -> StepOutputs:
    return StepOutputs([], 0.0, step)


def test_one_wake_up_delivers_all_queued_steps() -> None:
    scheduled: list[Callable[[], None]] = []
    delivered: list[int] = []
    output_queue = OutputQueue(scheduled.append, lambda outputs: delivered.append(outputs.step), unexpected_error)

    for step in (1, 2, 3):
        output_queue.put(step_outputs(step))
    scheduled[0]()
    output_queue.put(step_outputs(4))
    scheduled[1]()

    assert len(scheduled) == 2
    assert delivered == [1, 2, 3, 4]


def test_step_queued_during_delivery_is_delivered() -> None:
    scheduled: list[Callable[[], None]] = []
    delivered: list[int] = []

    def deliver(outputs: StepOutputs) -> None:
        delivered.append(outputs.step)
        if outputs.step == 1:
            output_queue.put(step_outputs(2))

    output_queue = OutputQueue(scheduled.append, deliver, unexpected_error)
    output_queue.put(step_outputs(1))
    for wake_up in scheduled:
        wake_up()

    assert delivered == [1, 2]


def test_error_while_delivering_is_reported() -> None:
    scheduled: list[Callable[[], None]] = []
    errors: list[Exception] = []

    def deliver(outputs: StepOutputs) -> None:
        raise KeyError("gone")

    OutputQueue(scheduled.append, deliver, errors.append).put(step_outputs(1))
    scheduled[0]()

    assert [type(error) for error in errors] == [KeyError]


class ScriptedCore:
    """Has work for `num_steps` steps, then calls `on_idle`."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_waits = 0
        self.on_idle: Callable[[], None] = lambda: None

    def has_work(self) -> bool:
        return self.num_steps > 0

    def wait_for_work(self) -> None:
        self.num_waits += 1
        if not self.num_steps:
            self.on_idle()

    def step(self) -> StepOutputs | None:
        self.num_steps -= 1
        return step_outputs(self.num_steps) if self.num_steps % 2 else None

    def wake(self) -> None:
        pass


def test_loop_queues_the_outputs_of_steps_until_stopped() -> None:
    core = ScriptedCore(num_steps=4)
    delivered: list[int] = []
    durations: list[float] = []
    output_queue = OutputQueue(lambda drain: drain(), lambda outputs: delivered.append(outputs.step), unexpected_error)
    loop = EngineLoop(core, output_queue, durations.append)
    core.on_idle = loop.stop

    loop.run()

    assert delivered == [3, 1]
    assert len(durations) == 2
    assert min(durations) >= 0


def test_a_loop_whose_requests_wait_for_their_grammars_uses_no_cpu() -> None:
    run = CoreRun()
    run.submit(make_request("a", grammar=fake_grammar()))
    used: list[float] = []
    output_queue = OutputQueue(lambda drain: drain(), lambda outputs: None, unexpected_error)
    loop = EngineLoop(run.core, output_queue, lambda seconds: None)

    def run_loop() -> None:
        loop.run()
        used.append(time.thread_time())

    thread = threading.Thread(target=run_loop)
    thread.start()
    time.sleep(0.3)
    loop.stop()
    thread.join()

    assert used[0] < 0.1
    assert run.core.has_unfinished_requests()


def unexpected_error(error: Exception) -> None:
    raise error
