"""EngineLoras: the adapters of one engine, those that it is loading, and those with requests of this gateway."""

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any

from proa.contract import LoadedLoras, Lora
from proa_gateway.errors import GatewayError, LoraNotLoaded

CallLoad = Callable[[], Coroutine[Any, Any, Lora]]
"""Calls the engine's LoadLora. Raises `LoraNotLoaded`."""


class EngineLoras:
    """The adapters are those of the engine's last message; `start` and `stop` begin and end its session."""

    def __init__(self, address: str, learn: Callable[[Lora, str], None]) -> None:
        """`learn` is called with each adapter that the engine did not have before, and the name of its model."""
        self.max_loras = 0  # different adapters in one step; 0: none are accepted
        self._address = address
        self._learn = learn
        self._model_name = ""  # of the session's engine
        self._loaded: dict[str, Lora] = {}  # by name
        self._loading: dict[tuple[str, str], asyncio.Task[Lora]] = {}  # by name and path
        self._num_requests: Counter[str] = Counter()  # unfinished ones, by adapter

    @property
    def has_free_slot(self) -> bool:
        """Whether a step can apply one adapter more than those with requests."""
        return len(self._num_requests) < self.max_loras

    def get(self, lora: Lora) -> Lora | None:
        """The loaded adapter with this name and content; without a digest, with this name and path."""
        loaded = self._loaded.get(lora.name)
        if loaded is None or (loaded.digest != lora.digest if lora.digest else loaded.path != lora.path):
            return None
        return loaded

    def has(self, lora: Lora) -> bool:
        """Whether it is loaded, or will be soon."""
        loaded = self._loaded.get(lora.name)
        if loaded is not None and loaded.digest == lora.digest:  # routing calls this for all engines
            return True
        return self.get(lora) is not None or (lora.name, lora.path) in self._loading

    def has_name(self, name: str) -> bool:
        return name in self._loaded

    def is_active(self, lora: Lora) -> bool:
        """Whether requests use it, or wait until it is loaded."""
        return lora.name in self._num_requests or (lora.name, lora.path) in self._loading

    def start(self, model_name: str, max_loras: int, loaded: LoadedLoras | None) -> None:
        self.max_loras, self._model_name = max_loras, model_name
        self.update(loaded or LoadedLoras())

    def stop(self) -> None:
        loading, self._loading = self._loading, {}
        for task in loading.values():
            task.cancel()
        self.max_loras = 0
        self._loaded.clear()
        self._num_requests.clear()

    def update(self, loaded: LoadedLoras) -> None:
        """Replace the loaded adapters."""
        before, self._loaded = self._loaded, {lora.name: lora for lora in loaded.loras}
        for lora in loaded.loras:
            if before.get(lora.name) != lora:
                self._learn(lora, self._model_name)

    def drop(self, name: str) -> None:
        """The engine rejected a request for the adapter, because it is not loaded."""
        self._loaded.pop(name, None)

    def count_request(self, name: str) -> None:
        """A request for the adapter was sent."""
        self._num_requests[name] += 1

    def uncount_request(self, name: str) -> None:
        """It has ended. Not called for those that are left when the session ends."""
        self._num_requests[name] -= 1
        if self._num_requests[name] <= 0:
            del self._num_requests[name]

    def begin_load(self, lora: Lora, call: CallLoad) -> asyncio.Task[Lora]:
        """Load an adapter, once for all who wait for it; continues if none does any more."""
        key = (lora.name, lora.path)
        task = self._loading.get(key)
        if task is None:
            task = self._loading[key] = asyncio.create_task(self._load(lora.name, call), name=f"load {lora.name}")
            task.add_done_callback(lambda done: self._end_load(key, done))
        return task

    async def wait(self, lora: Lora, task: asyncio.Task[Lora]) -> Lora:
        """The adapter that `begin_load` loads, with its digest. Raises `LoraNotLoaded`."""
        await asyncio.wait([task])
        if task.cancelled():  # also if gRPC cancelled the call, because its channel was closed
            raise LoraNotLoaded(f"Engine {self._address} was lost while it loaded the adapter {lora.name!r}.")
        return task.result()

    async def _load(self, name: str, call: CallLoad) -> Lora:
        try:
            return await call()
        except LoraNotLoaded as error:
            raise type(error)(f"Engine {self._address} did not load the adapter {name!r}: {error.message}") from None

    def _end_load(self, key: tuple[str, str], task: asyncio.Task[Lora]) -> None:
        if self._loading.get(key) is not task:  # the session has ended
            return
        del self._loading[key]
        if not task.cancelled() and not isinstance(task.exception(), GatewayError):
            lora = task.result()
            self._loaded[lora.name] = lora  # before the engine's own message
            self._learn(lora, self._model_name)
