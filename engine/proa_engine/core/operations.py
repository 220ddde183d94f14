"""Operators' calls to the core: empty the prefix cache, sleep, wake up. They run on its thread, between steps."""

from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Literal

from proa.contract import EngineCoreOutput
from proa_engine.core.executor import Executor
from proa_engine.core.scheduler import Scheduler

SleepLevel = Literal[1, 2]


@dataclass(frozen=True, slots=True)
class ResetPrefixCache:
    """Empty the prefix cache, as after a change of weights."""

    done: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class Sleep:
    """Free the executor's memory when no request is unfinished; unfinished ones are aborted unless `wait`.

    Done when the executor sleeps, or when a later `WakeUp` has cancelled that. An engine that sleeps already stays at
    its level.
    """

    level: SleepLevel
    wait: bool = False
    done: "Future[None]" = field(default_factory=Future)


@dataclass(frozen=True, slots=True)
class WakeUp:
    """End `Sleep`. Done when requests are accepted again."""

    done: "Future[None]" = field(default_factory=Future)


Operation = ResetPrefixCache | Sleep | WakeUp


class Operations:
    """`sleep_level` is above zero from the call of `Sleep` to the end of `WakeUp`; new requests must then be rejected.

    Exceptions of the executor are raised, and the engine cannot continue.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor) -> None:
        self.sleep_level: SleepLevel | Literal[0] = 0
        self._scheduler = scheduler
        self._executor = executor
        self._is_asleep = False
        self._falling_asleep: list[Future[None]] = []  # calls of `Sleep` that are not done

    @property
    def must_sleep(self) -> bool:
        """Whether `fall_asleep` is to be called as soon as no step is in flight."""
        if self.sleep_level == 0 or self._is_asleep:
            return False
        return not (self._scheduler.has_work or self._scheduler.has_pending)

    def run(self, operation: Operation, now: float) -> list[EngineCoreOutput]:
        """Do what the operator called for. Returns the last outputs of the requests that this aborts."""
        match operation:
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache()
                operation.done.set_result(None)
            case Sleep() if self._is_asleep:
                operation.done.set_result(None)
            case Sleep():
                self.sleep_level = self.sleep_level or operation.level
                self._falling_asleep.append(operation.done)
                return [] if operation.wait else self._scheduler.abort_all(now)
            case WakeUp():
                if self._is_asleep:
                    self._executor.wake_up()
                self._is_asleep, self.sleep_level = False, 0
                self._settle()
                operation.done.set_result(None)
        return []

    def fall_asleep(self) -> None:
        """Free the executor's memory. The prefix cache is emptied, as the content of the KV cache is lost."""
        assert self.sleep_level != 0
        self._scheduler.reset_prefix_cache()
        self._executor.sleep(self.sleep_level)
        self._is_asleep = True
        self._settle()

    def _settle(self) -> None:
        calls, self._falling_asleep = self._falling_asleep, []
        for done in calls:
            done.set_result(None)
