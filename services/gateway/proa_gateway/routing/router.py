"""Router: the gateway's routing policy and the prefix index that it reads."""

import asyncio
import logging
import random
import time
from collections.abc import Sequence

from proa.blocks import hash_blocks
from proa.contract import Hello, Image, Lora, extra_keys
from proa_gateway.routing.hints import HashChain, RoutingHints
from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.kv_events import Subscribe, follow_kv_events
from proa_gateway.routing.policies import make_policy

MAX_INLINE_TOKENS = 2048
"""Longest prompt, in tokens, that is hashed on the event loop (about 0.25 ms); longer ones are hashed on a thread."""
_log = logging.getLogger(__name__)


class Router:
    """Raises `ValueError` if `policy` is not one of `POLICIES`."""

    def __init__(self, policy: str) -> None:
        self.index = PrefixIndex()
        self.policy = make_policy(policy, self.index, random.Random(), time.monotonic)

    async def make_hints(
        self,
        token_ids: Sequence[int],
        chain: HashChain,
        *,
        cache_salt: str,
        session_id: str | None,
        lora: Lora | None,
        images: Sequence[Image] = (),
    ) -> RoutingHints:
        """Hash the prompt's blocks if the policy needs them, and an engine may have them."""
        if not self.policy.needs_hashes or (lora is not None and not lora.digest):
            return RoutingHints(session_id=session_id, lora=lora)
        name, content = (lora.name, lora.digest) if lora is not None else ("", "")
        arguments = (chain.root, token_ids, chain.block_size, extra_keys(cache_salt, name, content), images)
        if len(token_ids) <= MAX_INLINE_TOKENS:
            hashes = hash_blocks(*arguments)
        else:
            hashes = await asyncio.to_thread(hash_blocks, *arguments)
        return RoutingHints(hashes, chain, len(token_ids), session_id, lora)

    async def follow(self, address: str, hello: Hello, subscribe: Subscribe) -> None:
        """Keep the index up to date while an engine's session is open; cancelled when the session ends."""
        if self.policy.needs_hashes:
            try:
                await follow_kv_events(self.index, address, hello, subscribe)
            except Exception:
                _log.exception("KV events of engine %s are no longer followed", address)
