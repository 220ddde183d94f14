"""The models that engines serve, with their tokenizers and adapters."""

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass, field, replace
from pathlib import Path

from proa.blocks import BLOCK_HASH_VERSION
from proa.contract import Lora, ModelInfo, Role
from proa.lora_module import LoraModule
from proa.tokenizer_files import CHAT_TEMPLATE_FILE, digest, read_tokenizer_files
from proa_gateway.errors import EngineUnavailable
from proa_gateway.tokenizer import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KnownLora:
    """An adapter that requests may name."""

    lora: Lora  # its digest is empty until an engine has loaded it
    base_model: str | None  # None: the gateway's only model
    given: bool  # by an operator, through a flag or a request


class LoraRegistry:
    """An adapter is known from the first engine that reports it, or from an operator, until it is unloaded here.

    Engines also unload adapters for lack of memory, so an engine that no longer has one changes nothing.
    """

    def __init__(self, modules: Iterable[LoraModule] = ()) -> None:
        self._known = {  # by name
            each.name: KnownLora(Lora(name=each.name, path=each.path, digest=""), each.base_model_name, given=True)
            for each in modules
        }

    def __iter__(self) -> Iterator[KnownLora]:
        return iter(tuple(self._known.values()))

    def get(self, name: str) -> KnownLora | None:
        return self._known.get(name)

    def give(self, lora: Lora, base_model: str) -> None:
        """Add or replace an adapter that an operator has loaded."""
        self._known[lora.name] = KnownLora(lora, base_model, given=True)

    def learn(self, lora: Lora, base_model: str) -> None:
        """Add an adapter that an engine has loaded. The last report of a name counts; an operator's path counts more
        than an engine's."""
        known = self._known.get(lora.name)
        if known is not None:
            if known.base_model not in (None, base_model):
                _log.warning("adapter %s of %s ignored: %s has one", lora.name, base_model, known.base_model)
                return
            if known.given and known.lora.path != lora.path:
                _log.warning("adapter %s at %s ignored: it is at %s", lora.name, lora.path, known.lora.path)
                return
        self._known[lora.name] = KnownLora(lora, base_model, given=known is not None and known.given)

    def forget(self, name: str) -> None:
        self._known.pop(name, None)


ReadFiles = Callable[[], Awaitable[dict[str, bytes]]]
"""Raises `ValueError` for too many bytes."""


class EngineRefused(Exception):
    """The engine must not be used. The message is the reason."""


@dataclass(frozen=True, slots=True, eq=False)
class ServedModel:
    """A model that requests may name: an engine's, or one with an adapter."""

    info: ModelInfo  # of the engine's model
    tokenizer: Tokenizer
    created: int = field(default_factory=lambda: int(time.time()))  # Unix seconds, when the first engine connected
    lora: Lora | None = None  # None: the engine's model itself

    base_name: str = field(init=False)  # of the engines' model
    name: str = field(init=False)  # that requests and responses have

    def __post_init__(self) -> None:
        object.__setattr__(self, "base_name", self.info.model_name)
        object.__setattr__(self, "name", self.info.model_name if self.lora is None else self.lora.name)


class ModelRegistry:
    """`folder`: local tokenizer files, used instead of the engines' own. `chat_template`: its source, instead of each
    model's own. `loras`: the models' adapters. `prepare`: called in the executor with a model's name and its tokenizer,
    before the model is served."""

    def __init__(
        self,
        executor: Executor,
        *,
        folder: Path | None = None,
        chat_template: str | None = None,
        loras: LoraRegistry | None = None,
        prepare: Callable[[str, Tokenizer], None] | None = None,
    ) -> None:
        self.loras = loras if loras is not None else LoraRegistry()
        self._executor = executor
        self._folder = folder
        self._chat_template = chat_template
        self._prepare = prepare
        self._models: dict[str, ServedModel] = {}  # by name; stay when their engines are gone
        self.first_names: dict[str, str] = {}  # of every model, by any of its names
        self._engines: dict[str, set[str]] = {}  # model name -> addresses of its accepted engines
        self._locks: dict[str, asyncio.Lock] = {}  # by model name: a model's tokenizer is loaded once

    def names(self) -> Collection[str]:
        """Return the name of every model that an engine has served, even if none does now. Without adapters."""
        return self._models.keys()

    def aliases(self, name: str) -> list[str]:
        """Return the further names of a model."""
        return [alias for alias, first in self.first_names.items() if first == name != alias]

    def get(self, name: str) -> ServedModel:
        """Raises `EngineUnavailable` if no engine has served the model yet."""
        try:
            return self._models[name]
        except KeyError:
            raise EngineUnavailable(f"No engine is ready for the model {name!r}.") from None

    async def accept(self, address: str, info: ModelInfo, read_files: ReadFiles) -> None:
        """Register an engine's model. Loads its tokenizer by `read_files` if the model is new. An engine that only
        prefills does not change what is known of the model, for example its longest context.

        Raises `EngineRefused` if its tokenizer or block hashes do not fit the gateway or the model's other engines.
        """
        if info.block_hash_version != BLOCK_HASH_VERSION:
            raise EngineRefused(
                f"block hash version is {info.block_hash_version}, the gateway's is {BLOCK_HASH_VERSION}"
            )
        async with self._locks.setdefault(info.model_name, asyncio.Lock()):
            known = self._models.get(info.model_name)
            others = self._engines.setdefault(info.model_name, set()) - {address}
            if known is None or known.info != info:
                same = known is not None and known.info.tokenizer_digest == info.tokenizer_digest
                if not same and others:
                    replicas = ", ".join(sorted(others))
                    raise EngineRefused(f"tokenizer of {info.model_name} differs from that of {replicas}")
                if known and same:
                    if info.role is not Role.PREFILL:
                        self._models[info.model_name] = replace(known, info=info)
                else:
                    self._models[info.model_name] = ServedModel(info, await self._load(info, read_files))
            self._engines[info.model_name].add(address)
            self._learn_names(info)

    def forget(self, address: str) -> None:
        """Remove an engine. Its model stays known; once all its engines are gone, another tokenizer is accepted."""
        for addresses in self._engines.values():
            addresses.discard(address)

    def _learn_names(self, info: ModelInfo) -> None:
        self.first_names[info.model_name] = info.model_name  # also if it was a further name of another model
        for alias in info.aliases:
            owner = self.first_names.setdefault(alias, info.model_name)
            if owner != info.model_name:
                _log.warning("name %s of the model %s ignored: it is one of %s", alias, info.model_name, owner)

    async def _load(self, info: ModelInfo, read_files: ReadFiles) -> Tokenizer:
        started = time.monotonic()
        if self._folder is not None:
            files: Mapping[str, bytes] = read_tokenizer_files(self._folder)
        elif not info.tokenizer_digest:
            raise EngineRefused("engine has no tokenizer, and --tokenizer is not set")
        else:
            try:
                files = await read_files()
            except ValueError as error:
                raise EngineRefused(f"tokenizer cannot be loaded: {error}") from error
            if digest(files) != info.tokenizer_digest:
                raise EngineRefused("tokenizer files do not match the engine's tokenizer digest")
        if self._chat_template is not None:
            files = {**files, CHAT_TEMPLATE_FILE: self._chat_template.encode()}
        loop = asyncio.get_running_loop()
        try:
            tokenizer = await loop.run_in_executor(self._executor, self._read, info.model_name, files)
        except ValueError as error:
            raise EngineRefused(f"tokenizer cannot be loaded: {error}") from error
        _log.info("tokenizer of %s loaded in %.2f s", info.model_name, time.monotonic() - started)
        return tokenizer

    def _read(self, model_name: str, files: Mapping[str, bytes]) -> Tokenizer:
        tokenizer = Tokenizer(files, self._executor)
        if self._prepare is not None:
            self._prepare(model_name, tokenizer)
        return tokenizer
