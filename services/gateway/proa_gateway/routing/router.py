"""Router: the routing policy of a gateway, and the KV events that keep its prefix index up to date."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial

from proa.blocks import hash_blocks
from proa.contract import Audio, Hello, Image, KvEvents, Lora, ModelInfo, PromptEmbeds, extra_keys
from proa_gateway.keep_running import keep_running
from proa_gateway.routing.index import TieredIndex
from proa_gateway.routing.policies import (
    WEIGHTS,
    AnyCandidate,
    HashChain,
    RoutingHints,
    hash_chain,
    is_overloaded,
    make_policy,
)
from proa_gateway.sessions.engine_sessions import EngineSessions
from proa_gateway.sessions.model_sessions import Engine, ModelSessions

RETRY_DELAY = 1.0  # seconds
BATCH_BLOCKS = 1024
"""Blocks applied before control returns to the event loop: about 0.5 ms."""
_log = logging.getLogger(__name__)

Subscribe = Callable[[], AsyncGenerator[KvEvents, None]]
MAX_INLINE_TOKENS = 2048
"""Longest prompt, in tokens, that is hashed on the event loop (about 0.25 ms); longer ones are hashed on a thread."""


class KvEventsRefused(Exception):
    """The engine has no KV cache events, for the reason given."""


async def follow_kv_events(
    index: TieredIndex, address: str, hello: Hello, subscribe: Subscribe, host_weight: Callable[[], float]
) -> None:
    """Keep the engine in the index until cancelled, then remove it. `host_weight`: as for `TieredIndex.add_engine`.

    Subscribes again when the stream ends or skips a sequence number. Returns at once if the engine has no prefix cache.
    """
    if not hello.model.prefix_caching:
        return
    model = hello.model
    sizes = model.num_gpu_blocks, model.num_host_blocks
    index.add_engine(address, hash_chain(model), *sizes, model.checkpoint_rule, host_weight)
    try:
        while True:
            try:
                await _apply(index, address, subscribe())
            except KvEventsRefused as refused:
                _log.warning("KV events of engine %s are not available: %s", address, refused)
                index.device.disable_events(address)
                await asyncio.get_running_loop().create_future()  # until cancelled
            await asyncio.sleep(RETRY_DELAY)
    finally:
        index.remove_engine(address)


async def _apply(index: TieredIndex, address: str, events: AsyncGenerator[KvEvents, None]) -> None:
    """Apply events until the stream ends or a sequence number is missing."""
    expected = None
    async with aclosing(events):
        async for event in events:
            if event.sequence != expected and not event.snapshot:
                _log.warning("KV events of engine %s are missing: %s to %d", address, expected, event.sequence)
                return
            expected = event.sequence + 1
            if event.snapshot:
                index.device.clear_confirmed(address)
            await _in_batches(event.removed, index.device.remove_confirmed, address)
            await _in_batches(event.stored, index.device.add_confirmed, address)
            await _in_batches(event.checkpoints_removed, index.device.remove_checkpoints, address)
            await _in_batches(event.checkpoints_stored, index.device.add_checkpoints, address)
            if not index.host.has_replica(address):
                continue
            if event.host_snapshot:
                index.host.clear_confirmed(address)
            await _in_batches(event.host_removed, index.host.remove_confirmed, address)
            await _in_batches(event.host_stored, index.host.add_confirmed, address)
            await _in_batches(event.host_checkpoints_removed, index.host.remove_checkpoints, address)
            await _in_batches(event.host_checkpoints_stored, index.host.add_checkpoints, address)


async def _in_batches(hashes: Sequence[bytes], apply: Callable[[str, Sequence[bytes]], None], address: str) -> None:
    for start in range(0, len(hashes), BATCH_BLOCKS):
        apply(address, hashes[start : start + BATCH_BLOCKS])
        await asyncio.sleep(0)


class Router:
    """Raises `ValueError` if `policy` is not one of `POLICIES`. `on_room`: sessions keep their blocks, with a policy
    that computes hashes; it is called when there may be room for another session."""

    def __init__(self, policy: str, *, on_room: Callable[[], None] | None = None) -> None:
        self._on_room = on_room
        self._sessions: dict[tuple[str, HashChain], ModelSessions] = {}  # by name of the model
        self.index = TieredIndex()
        self.policy = make_policy(policy, self.index, random.Random(), time.monotonic)

    async def make_hints(
        self,
        token_ids: Sequence[int],
        chain: HashChain,
        *,
        cache_salt: str,
        session_id: str | None,
        lora: Lora | None,
        media: Sequence[Image | Audio] = (),
        embeds: Sequence[PromptEmbeds] = (),
    ) -> RoutingHints:
        """Hash the prompt's blocks if the policy needs them, and an engine may have them."""
        if not self.policy.needs_hashes or (lora is not None and not lora.digest):
            return RoutingHints(session_id=session_id, lora=lora)
        name, content = (lora.name, lora.digest) if lora is not None else ("", "")
        keys = extra_keys(cache_salt, name, content)
        arguments = (chain.root, token_ids, chain.block_size, keys, media, embeds)
        if len(token_ids) <= MAX_INLINE_TOKENS:
            hashes = hash_blocks(*arguments)
        else:
            hashes = await asyncio.to_thread(hash_blocks, *arguments)
        return RoutingHints(hashes, chain, len(token_ids), session_id, lora)

    def choose(self, model: str, candidates: Mapping[str, AnyCandidate], hints: RoutingHints) -> AnyCandidate:
        """One of the candidates, by address, of which there is at least one: the home of the session that a prompt
        continues, if it is not overloaded, or that of the policy's choice."""
        sessions = self.sessions(model, hints) if self._sessions else None
        home = None if sessions is None else sessions.home(hints.block_hashes)
        chosen = None if home is None else candidates.get(home.address)
        if chosen is None:
            return self.policy.choose(candidates, hints)
        if chosen.load > WEIGHTS.overload:
            least = min(candidate.load for candidate in candidates.values())
            if is_overloaded(chosen, least, WEIGHTS):
                return self.policy.choose(candidates, hints)
        return chosen

    def sessions(self, model: str, hints: RoutingHints) -> ModelSessions | None:
        """The sessions of a model whose engines hash prompts as they are in the hints; None: they keep no blocks."""
        return None if hints.chain is None else self._sessions.get((model, hints.chain))

    def new_sessions(self, engine: Engine, info: ModelInfo) -> EngineSessions | None:
        """The sessions of an engine that has connected; None: they keep no blocks."""
        if self._on_room is None or not self.policy.needs_hashes:
            return None
        key = info.model_name, hash_chain(info)
        model = self._sessions.get(key)
        if model is None:
            model = ModelSessions(info.block_size, time.monotonic, self.index.device.count_confirmed)
            self._sessions[key] = model
        return EngineSessions(engine, info, model, time.monotonic, self._on_room)

    async def follow(self, address: str, hello: Hello, subscribe: Subscribe, host_weight: Callable[[], float]) -> None:
        """Keep the index up to date while an engine's session is open; cancelled when the session ends.
        `host_weight`: as for `TieredIndex.add_engine`."""
        if self.policy.needs_hashes:
            follow = partial(follow_kv_events, self.index, address, hello, subscribe, host_weight)
            await keep_running(f"following the KV events of engine {address}", follow)
