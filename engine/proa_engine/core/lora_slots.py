"""Adapters as requests use them, and LoraSlots: assigns the device's adapter slots to adapters."""

from dataclasses import replace

from proa.contract import EngineCoreRequest, Lora
from proa_engine.core.types import BASE_MODEL, LoraSlot


class Adapter:
    """A loaded adapter. It keeps its slot while its requests run, and then until another adapter needs the slot."""

    __slots__ = ("id", "lora", "num_requests", "num_running", "slot")

    takes_slot = True

    def __init__(self, lora_id: int, lora: Lora) -> None:
        self.id = lora_id  # the executor's id, never reused
        self.lora = lora
        self.num_requests = 0  # number of unfinished requests
        self.num_running = 0
        self.slot: int | None = None

    @property
    def has_slot(self) -> bool:
        return self.slot is not None

    @property
    def in_step(self) -> LoraSlot:
        """What a step is told of the adapter, whose requests run."""
        assert self.slot is not None, "a running request's adapter has a slot"
        return LoraSlot(self.id, self.slot)

    def named_in(self, request: EngineCoreRequest) -> EngineCoreRequest:
        """Return the request with the digest of the adapter that it gets."""
        return replace(request, lora_digest=self.lora.digest)

    def add_request(self) -> None:
        self.num_requests += 1

    def remove_request(self) -> None:
        self.num_requests -= 1

    def start(self, slots: "LoraSlots") -> None:
        """Count one more running request."""
        slots.start(self)

    def stop(self, slots: "LoraSlots") -> None:
        """Count one running request fewer."""
        slots.stop(self)


class NoAdapter:
    """The `Adapter` of requests that name none. It needs no slot, and its requests are not counted."""

    takes_slot = False
    has_slot = True
    in_step = BASE_MODEL
    num_requests = 0

    def named_in(self, request: EngineCoreRequest) -> EngineCoreRequest:
        return request

    def add_request(self) -> None:
        pass

    def remove_request(self) -> None:
        pass

    def start(self, slots: "LoraSlots") -> None:
        pass

    def stop(self, slots: "LoraSlots") -> None:
        pass


NO_ADAPTER = NoAdapter()


class LoraSlots:
    """Slots on the device, from which a step applies up to `num_slots` adapters."""

    def __init__(self, num_slots: int) -> None:
        self._num_slots = num_slots
        self._free = list(range(num_slots))  # slots that no adapter has, in the order in which they are assigned
        self._running: list[Adapter] = []  # adapters with slots and running requests
        self._idle: list[Adapter] = []  # adapters with slots, in the order in which they lose them

    @property
    def has_idle(self) -> bool:
        """Whether an adapter without a slot can get one."""
        return bool(self._free or self._idle)

    @property
    def least_used(self) -> Adapter:
        """The adapter with the fewest running requests. Only meaningful if no slot is idle."""
        return min(self._running, key=lambda adapter: (adapter.num_running, adapter.slot))

    def start(self, adapter: Adapter) -> None:
        """Count one more running request of the adapter. If it has no slot, it takes the one that is idle longest."""
        if adapter.num_running == 0:
            if adapter.has_slot:
                self._idle.remove(adapter)
            else:
                if not self._free:
                    self._empty(self._idle.pop(0))
                adapter.slot = self._free.pop(0)
            self._running.append(adapter)
        adapter.num_running += 1

    def stop(self, adapter: Adapter) -> None:
        """Count one running request of the adapter fewer."""
        adapter.num_running -= 1
        if adapter.num_running == 0:
            self._running.remove(adapter)
            self._idle.append(adapter)

    def forget(self, adapter: Adapter) -> None:
        """Free the slot of an adapter that is unloaded."""
        assert adapter.num_running == 0
        if adapter.has_slot:
            self._idle.remove(adapter)
            self._empty(adapter)

    def clear(self) -> None:
        """Free all slots, because their content is lost. No request may be running."""
        assert not self._running
        while self._idle:
            self._empty(self._idle.pop())

    def check_integrity(self, adapters: list[Adapter]) -> None:
        """Raises `AssertionError` unless each slot is free or has one of `adapters`, and those with running requests
        have slots."""
        held = [*self._running, *self._idle]
        assert sorted([*self._free, *(adapter.in_step.slot for adapter in held)]) == list(range(self._num_slots))
        assert all((adapter.num_running > 0) == (adapter in self._running) for adapter in adapters)
        assert {adapter for adapter in adapters if adapter.has_slot} == set(held)

    def _empty(self, adapter: Adapter) -> None:
        """Make the slot of an adapter the next that is assigned."""
        self._free.insert(0, adapter.in_step.slot)
        adapter.slot = None
