"""The busy loop, and how its outputs reach the I/O thread."""

from collections.abc import Callable

from proa.contract import SchedulerStats
from proa_engine.core.types import StepOutputs
from proa_engine.server.engine_loop import EngineLoop, Handoff


def step_outputs(step: int) -> StepOutputs:
    return StepOutputs([], SchedulerStats(), 0.0, step)


def test_outputs_that_gather_take_one_wake_up() -> None:
    scheduled: list[Callable[[], None]] = []
    taken: list[int] = []
    handoff = Handoff(scheduled.append, lambda outputs: taken.append(outputs.step), errors_are_not_expected)

    for step in (1, 2, 3):
        handoff.put(step_outputs(step))
    scheduled[0]()
    handoff.put(step_outputs(4))
    scheduled[1]()

    assert len(scheduled) == 2
    assert taken == [1, 2, 3, 4]


def test_output_put_while_others_are_taken_is_not_forgotten() -> None:
    scheduled: list[Callable[[], None]] = []
    taken: list[int] = []

    def take(outputs: StepOutputs) -> None:
        taken.append(outputs.step)
        if outputs.step == 1:
            handoff.put(step_outputs(2))

    handoff = Handoff(scheduled.append, take, errors_are_not_expected)
    handoff.put(step_outputs(1))
    for wake_up in scheduled:
        wake_up()

    assert taken == [1, 2]


def test_error_while_delivering_is_told() -> None:
    scheduled: list[Callable[[], None]] = []
    errors: list[Exception] = []

    def take(outputs: StepOutputs) -> None:
        raise KeyError("gone")

    Handoff(scheduled.append, take, errors.append).put(step_outputs(1))
    scheduled[0]()

    assert [type(error) for error in errors] == [KeyError]


class ScriptedCore:
    """Has work for some steps, then waits, and is woken by `stop`."""

    def __init__(self, num_steps: int) -> None:
        self.num_steps = num_steps
        self.num_waits = 0
        self.on_idle: Callable[[], None] = lambda: None

    def has_unfinished_requests(self) -> bool:
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


def test_loop_hands_over_what_steps_say_and_stops() -> None:
    core = ScriptedCore(num_steps=4)
    taken: list[int] = []
    durations: list[float] = []
    handoff = Handoff(lambda drain: drain(), lambda outputs: taken.append(outputs.step), errors_are_not_expected)
    loop = EngineLoop(core, handoff, durations.append)
    core.on_idle = loop.stop

    loop.run()

    assert taken == [3, 1]
    assert len(durations) == 2
    assert min(durations) >= 0


def errors_are_not_expected(error: Exception) -> None:
    raise error
