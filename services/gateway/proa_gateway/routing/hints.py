"""Wishes: what a request's engine is to be chosen by. Hashing a prompt belongs to tokenizing it, not to the choice."""

import asyncio
from collections.abc import Sequence

from proa.blocks import hash_blocks
from proa_gateway.types import BlockChain, RoutingHints

# Longer prompts, in tokens, are hashed on another thread: this many take about a quarter of a millisecond.
INLINE_TOKENS = 2048


async def make_routing_hints(
    token_ids: Sequence[int], chain: BlockChain, *, cache_salt: str, session: str | None
) -> RoutingHints:
    """For a prompt that any engine with this chain may have in its cache."""
    if len(token_ids) <= INLINE_TOKENS:
        hashes = _hashes(token_ids, chain, cache_salt)
    else:
        hashes = await asyncio.to_thread(_hashes, token_ids, chain, cache_salt)
    return RoutingHints(block_hashes=hashes, chain=chain, num_tokens=len(token_ids), session=session)


def _hashes(token_ids: Sequence[int], chain: BlockChain, cache_salt: str) -> list[bytes]:
    return hash_blocks(chain.root, token_ids, chain.block_size, (cache_salt,) if cache_salt else ())
