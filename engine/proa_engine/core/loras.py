"""Loras: the adapters that requests may name, and unloaded ones that still have unfinished requests."""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait

from proa.contract import EngineCoreRequest, LoadedLoras, Lora
from proa_engine.core.lora_slots import NO_ADAPTER, Adapter, LoraSlots, NoAdapter
from proa_engine.core.lora_store import (
    LoraError,
    LoraExists,
    LoraInvalid,
    LoraNotFound,
    LoraStore,
    NoLoraStore,
    TooManyLoras,
)
from proa_engine.core.operations import LoadLora, UnloadLora
from proa_engine.core.request import Request

MAX_NAME_LENGTH = 256


class Loras:
    """At most `max_cpu_loras` adapters are loaded, and at most `max_loras` of them are applied in one step.

    An adapter's content never changes: if another content is loaded under its name, that is a new `Adapter`. The
    callback `on_loaded` of `load` is called from any thread; everything else is used on the core's thread.
    """

    def __init__(self, store: LoraStore | None = None, *, max_loras: int = 0, max_cpu_loras: int = 0) -> None:
        """Without a `store` there are no adapters, and none can be loaded."""
        if max_cpu_loras < max_loras:
            raise ValueError(f"max_cpu_loras must be at least max_loras ({max_loras}), got {max_cpu_loras}")
        self.slots = LoraSlots(max_loras)
        self.are_enabled = bool(store)
        self._store: LoraStore = store or NoLoraStore()
        self._max_loaded = max_cpu_loras
        self._by_name: dict[str, Adapter] = {}  # adapters that requests may name, the least recently used first
        self._leaving: list[Adapter] = []  # unloaded adapters that still have requests
        self._num_loaded = 0  # since the start
        self._loading: deque[LoadLora] = deque()  # the first one is being read
        self.has_changed = False  # whether `loaded` has changed since clients were told

    @property
    def loaded(self) -> LoadedLoras:
        """The adapters that requests may name."""
        return LoadedLoras(loras=tuple(self._by_name[name].lora for name in sorted(self._by_name)))

    def find(self, request: EngineCoreRequest) -> Adapter | NoAdapter:
        """Return the adapter that the request names. Raises `LoraNotFound` if it is not loaded, or has another
        digest."""
        if not request.lora_name:
            return NO_ADAPTER
        adapter = self._by_name.get(request.lora_name)
        if adapter is None or request.lora_digest not in ("", adapter.lora.digest):
            raise LoraNotFound(f"the adapter {request.lora_name!r} is not loaded, or has another content")
        self._by_name[request.lora_name] = self._by_name.pop(request.lora_name)
        return adapter

    def remove_request(self, request: Request) -> None:
        """Count one request fewer for its adapter. After its last request, an unloaded adapter's memory is freed."""
        request.lora.remove_request()
        for adapter in [each for each in self._leaving if each.num_requests == 0]:
            self._leaving.remove(adapter)
            self._free(adapter)

    def load(self, operation: LoadLora, on_loaded: Callable[["Future[str]"], None]) -> None:
        """Load an adapter, or queue the load. `on_loaded` is called with the argument for `finish_load`."""
        if not self.are_enabled:
            message = "this engine does not support LoRA adapters; start it with --enable-lora"
            operation.done.set_exception(LoraInvalid(message))
            return
        if not operation.name or not operation.path:
            operation.done.set_exception(LoraInvalid("an adapter needs a name and a path"))
            return
        if len(operation.name) > MAX_NAME_LENGTH or "," in operation.name or not operation.name.isprintable():
            message = f"the name of an adapter may have {MAX_NAME_LENGTH} printable characters, and no comma"
            operation.done.set_exception(LoraInvalid(message))
            return
        self._loading.append(operation)
        if len(self._loading) == 1:
            self._read_first(on_loaded)

    def load_now(self, operation: LoadLora) -> Lora:
        """Load an adapter before the engine starts, and wait for it. Raises `LoraError`."""
        self._num_loaded += 1
        future = self._store.load_lora(self._num_loaded, operation.path)
        wait([future])
        return self._add(operation, future)

    def finish_load(self, digest: "Future[str]", on_loaded: Callable[["Future[str]"], None]) -> None:
        """Make the adapter that was read available, or fail the operation; then start the next queued load."""
        operation = self._loading.popleft()
        try:
            operation.done.set_result(self._add(operation, digest))
        except Exception as error:
            operation.done.set_exception(error)
        if self._loading:
            self._read_first(on_loaded)

    def unload(self, operation: UnloadLora) -> None:
        """Unload an adapter. Its unfinished requests continue."""
        if operation.name not in self._by_name:
            operation.done.set_exception(LoraNotFound(f"no adapter has the name {operation.name!r}"))
            return
        self._remove(operation.name)
        operation.done.set_result(None)

    def check_integrity(self, running: Iterable[Request], unfinished: Iterable[Request]) -> None:
        """Raises `AssertionError` unless all requests are counted, and the only unloaded adapters kept are those with
        requests."""
        adapters = [*self._by_name.values(), *self._leaving]
        num_running = Counter(request.lora for request in running)
        num_requests = Counter(request.lora for request in unfinished)
        assert num_requests.keys() <= {*adapters, NO_ADAPTER}
        assert all(adapter.num_running == num_running[adapter] for adapter in adapters)
        assert all(adapter.num_requests == num_requests[adapter] for adapter in adapters)
        assert all(adapter.num_requests for adapter in self._leaving)
        assert len(adapters) <= self._max_loaded
        self.slots.check_integrity(adapters)

    def _read_first(self, on_loaded: Callable[["Future[str]"], None]) -> None:
        self._num_loaded += 1
        self._store.load_lora(self._num_loaded, self._loading[0].path).add_done_callback(on_loaded)

    def _add(self, operation: LoadLora, future: "Future[str]") -> Lora:
        """Add the adapter that was read last. Raises `LoraError`, without a change, if that is impossible."""
        lora = Lora(name=operation.name, path=operation.path, digest=future.result())
        adapter = Adapter(self._num_loaded, lora)
        known = self._by_name.get(lora.name)
        if known is not None and known.lora.digest == lora.digest:
            self._free(adapter)
            return known.lora
        try:
            self._make_room(operation, known)
        except LoraError:
            self._free(adapter)
            raise
        if known is not None:
            self._remove(lora.name)
        self._by_name[lora.name] = adapter
        self.has_changed = True
        return lora

    def _make_room(self, operation: LoadLora, known: Adapter | None) -> None:
        """Unload the least recently used adapters without requests, as many as needed, except `known`."""
        if known is not None and not operation.replace:
            raise LoraExists(f"the name {operation.name!r} belongs to an adapter of another content; set replace")
        idle = [name for name, adapter in self._by_name.items() if adapter.num_requests == 0 and adapter is not known]
        num_kept = len(self._by_name) + len(self._leaving) - (known is not None and known.num_requests == 0)
        num_surplus = max(num_kept + 1 - self._max_loaded, 0)
        if num_surplus > len(idle):
            raise TooManyLoras(f"{num_kept} adapters are loaded, which is the maximum, and all have requests")
        for name in idle[:num_surplus]:
            self._remove(name)

    def _remove(self, name: str) -> None:
        adapter = self._by_name.pop(name)
        self.has_changed = True
        if adapter.num_requests:
            self._leaving.append(adapter)
        else:
            self._free(adapter)

    def _free(self, adapter: Adapter) -> None:
        self.slots.forget(adapter)
        self._store.unload_lora(adapter.id)
