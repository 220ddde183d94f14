"""LoraSlots: the slots of the device that adapters are applied from, and which adapters have them."""

from proa.contract import Lora


class Adapter:
    """A loaded adapter. It keeps its slot while requests of it run, and after that until another adapter needs it."""

    __slots__ = ("id", "lora", "num_passed", "num_requests", "num_running", "slot")

    def __init__(self, lora_id: int, lora: Lora) -> None:
        self.id = lora_id  # in the executor; never used again
        self.lora = lora
        self.num_requests = 0  # unfinished
        self.num_running = 0
        self.slot: int | None = None
        self.num_passed = 0  # see `LoraQueue`


class LoraSlots:
    """`num_slots` adapters can be applied in one step."""

    def __init__(self, num_slots: int) -> None:
        self._holders: list[Adapter | None] = [None] * num_slots
        self._idle = list(range(num_slots))  # slots that no running request uses, the first to be given away in front

    @property
    def has_idle(self) -> bool:
        """Whether an adapter without a slot can have one."""
        return bool(self._idle)

    @property
    def least_used(self) -> Adapter:
        """The adapter with the fewest running requests, where no slot is idle."""
        return min((adapter for adapter in self._holders if adapter is not None), key=_num_running)

    def start(self, adapter: Adapter) -> None:
        """Count a running request more. An adapter without a slot takes the one that is idle for longest."""
        if adapter.slot is None:
            slot = self._idle.pop(0)
            self._empty(slot)
            self._holders[slot], adapter.slot = adapter, slot
        elif adapter.num_running == 0:
            self._idle.remove(adapter.slot)
        adapter.num_running += 1

    def stop(self, adapter: Adapter) -> None:
        """Count a running request less."""
        adapter.num_running -= 1
        if adapter.num_running == 0:
            assert adapter.slot is not None
            self._idle.append(adapter.slot)

    def forget(self, adapter: Adapter) -> None:
        """Take the slot of an adapter that is freed."""
        assert adapter.num_running == 0
        slot = adapter.slot
        if slot is not None:
            self._empty(slot)
            self._idle.remove(slot)
            self._idle.insert(0, slot)

    def clear(self) -> None:
        """Take all slots, as their content is lost. No request may be running."""
        assert len(self._idle) == len(self._holders)
        for slot in self._idle:
            self._empty(slot)

    def check_integrity(self, adapters: list[Adapter]) -> None:
        """Raises `AssertionError` unless each slot is empty or has one of `adapters`, and idle ones are as noted."""
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
