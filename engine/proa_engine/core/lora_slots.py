"""LoraSlots: assigns the device's adapter slots to adapters."""

from proa.contract import Lora


class Adapter:
    """A loaded adapter. It keeps its slot while its requests run, and then until another adapter needs the slot."""

    __slots__ = ("id", "lora", "num_passed", "num_requests", "num_running", "slot")

    def __init__(self, lora_id: int, lora: Lora) -> None:
        self.id = lora_id  # the executor's id, never reused
        self.lora = lora
        self.num_requests = 0  # number of unfinished requests
        self.num_running = 0
        self.slot: int | None = None
        self.num_passed = 0  # requests that started before its older ones, see `LoraQueue`


class LoraSlots:
    """Slots on the device, from which a step applies up to `num_slots` adapters."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Adapter | None] = [None] * num_slots
        self._idle = list(range(num_slots))  # slots without running requests, in the order in which they are reassigned

    @property
    def has_idle(self) -> bool:
        """Whether an adapter without a slot can get one."""
        return bool(self._idle)

    @property
    def least_used(self) -> Adapter:
        """The adapter with the fewest running requests. Only meaningful if no slot is idle."""
        return min((adapter for adapter in self._holders if adapter is not None), key=_num_running)

    def start(self, adapter: Adapter) -> None:
        """Count one more running request of the adapter. If it has no slot, it takes the one that is idle longest."""
        if adapter.slot is None:
            slot = self._idle.pop(0)
            self._empty(slot)
            self._holders[slot], adapter.slot = adapter, slot
        elif adapter.num_running == 0:
            self._idle.remove(adapter.slot)
        adapter.num_running += 1

    def stop(self, adapter: Adapter) -> None:
        """Count one running request of the adapter fewer."""
        adapter.num_running -= 1
        if adapter.num_running == 0:
            assert adapter.slot is not None
            self._idle.append(adapter.slot)

    def forget(self, adapter: Adapter) -> None:
        """Free the slot of an adapter that is unloaded."""
        assert adapter.num_running == 0
        slot = adapter.slot
        if slot is not None:
            self._empty(slot)
            self._idle.remove(slot)
            self._idle.insert(0, slot)

    def clear(self) -> None:
        """Free all slots, because their content is lost. No request may be running."""
        assert len(self._idle) == len(self._holders)
        for slot in self._idle:
            self._empty(slot)

    def check_integrity(self, adapters: list[Adapter]) -> None:
        """Raises `AssertionError` unless each slot is empty or has one of `adapters`, and the idle slots are those
        without running requests."""
        for slot, holder in enumerate(self._holders):
            assert holder is None or (holder.slot == slot and holder in adapters)
            assert (slot in self._idle) is (holder is None or holder.num_running == 0)
        assert len(self._idle) == len(set(self._idle))
        for adapter in adapters:
            assert adapter.slot is None or self._holders[adapter.slot] is adapter
            assert adapter.slot is not None or adapter.num_running == 0

    def _empty(self, slot: int) -> None:
        if (adapter := self._holders[slot]) is not None:
            adapter.slot = self._holders[slot] = None


def _num_running(adapter: Adapter) -> int:
    return adapter.num_running
