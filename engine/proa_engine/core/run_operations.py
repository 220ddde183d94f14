"""Operations: runs operators' calls on the core's thread, between steps."""

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, Literal

from proa.contract import EngineCoreOutput
from proa_engine.core.executor import Executor
from proa_engine.core.operations import (
    EndStream,
    LoadLora,
    Operation,
    ResetPrefixCache,
    Sleep,
    SleepLevel,
    UnloadLora,
    WakeUp,
)
from proa_engine.core.scheduler import Scheduler


class Operations:
    """Runs operators' calls.

    `sleep_level` is above zero from the call of `Sleep` to the end of `WakeUp`; new requests must then be rejected.
    Exceptions of the executor are raised, and the engine cannot continue.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, on_lora_read: Callable[["Future[str]"], None]) -> None:
        """`on_lora_read` is called from any thread with the argument for `Loras.finish_load`."""
        self.sleep_level: SleepLevel | Literal[0] = 0
        self._scheduler = scheduler
        self._executor = executor
        self._on_lora_read = on_lora_read
        self._is_asleep = False
        self._since = 0.0  # of the call that set `sleep_level`
        self._falling_asleep: list[Future[None]] = []  # calls of `Sleep` that are not done

    @property
    def must_sleep(self) -> bool:
        """Whether `fall_asleep` is to be called as soon as no step is in flight."""
        if self.sleep_level == 0 or self._is_asleep:
            return False
        return not (self._scheduler.has_work or self._scheduler.has_pending)

    def run(self, operation: Operation[Any], now: float) -> list[EngineCoreOutput]:
        """Run the operation. Returns the last outputs of the requests that it aborts."""
        match operation:
            case ResetPrefixCache():
                self._scheduler.reset_prefix_cache(operation.since or now)
                operation.done.set_result(None)
            case EndStream():
                self._scheduler.retention.forget(operation.client_index)
                operation.done.set_result(None)
            case Sleep() if self._is_asleep:
                operation.done.set_result(None)
            case Sleep():
                if self.sleep_level == 0:
                    self.sleep_level, self._since = operation.level, operation.since
                self._falling_asleep.append(operation.done)
                return [] if operation.wait else self._scheduler.abort_all(now)
            case WakeUp():
                if self._is_asleep:
                    self._executor.wake_up()
                    self._scheduler.loras.slots.clear()
                    self._scheduler.encoder_cache.clear()
                self._is_asleep, self.sleep_level = False, 0
                self._settle()
                operation.done.set_result(None)
            case LoadLora():
                self._scheduler.loras.load(operation, self._on_lora_read)
            case UnloadLora():
                self._scheduler.loras.unload(operation)
        return []

    def fall_asleep(self, now: float) -> None:
        """Free the executor's memory. The device's KV cache is lost; the host tier is kept at level 1."""
        assert self.sleep_level != 0
        self._scheduler.reset_prefix_cache(self._since or now, keep_host=self.sleep_level == 1)
        self._executor.sleep(self.sleep_level)
        self._is_asleep = True
        self._settle()

    def _settle(self) -> None:
        calls, self._falling_asleep = self._falling_asleep, []
        for done in calls:
            done.set_result(None)
