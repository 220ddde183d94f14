"""Outbox: what the core has for its clients and has not sent yet."""

from proa.contract import EngineCoreOutput
from proa_engine.core.admission.request_admission import Admission
from proa_engine.core.kv_events import KvEvents
from proa_engine.core.loras import Loras
from proa_engine.core.run_operations import Operations
from proa_engine.core.types import PlainTokens, Rejection, StepOutputs


class Outbox:
    """Outputs and rejections, and the changes of the prefix cache, the adapters and the sleep level."""

    def __init__(self, kv_events: KvEvents, loras: Loras, operations: Operations) -> None:
        self.outputs: list[EngineCoreOutput] = []
        self.plain = PlainTokens()
        self._rejections: list[Rejection] = []
        self._kv_events = kv_events
        self._loras = loras
        self._operations = operations
        self._sent_sleep_level = 0

    def add(self, admission: Admission) -> None:
        """Add what came of a request that was submitted."""
        if isinstance(admission, Rejection):
            self._rejections.append(admission)
        elif admission:
            self.outputs.append(admission)

    @property
    def has_any(self) -> bool:
        """Whether there are outputs or changes to send."""
        if self.outputs or self.plain.token_ids or self._rejections:
            return True
        has_slept = self._operations.sleep_level != self._sent_sleep_level
        return has_slept or self._kv_events.has_pending or self._loras.has_changed

    def take(self, timestamp: float, num_steps: int) -> StepOutputs:
        """Return all that is to be sent after `num_steps` steps."""
        kv_events = self._kv_events.take()
        loras = self._loras.loaded if self._loras.has_changed else None
        self._loras.has_changed = False
        self._sent_sleep_level = self._operations.sleep_level
        outputs, self.outputs = self.outputs, []
        plain, self.plain = self.plain, PlainTokens()
        rejections, self._rejections = self._rejections, []
        return StepOutputs(outputs, timestamp, num_steps, plain, rejections, kv_events, loras, self._sent_sleep_level)
