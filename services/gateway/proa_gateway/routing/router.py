"""Router: a policy by name, with what it has to know of the engines' caches. Says nothing of who may be chosen."""

import random
import time
from collections.abc import Mapping

from proa_gateway.routing.index import PrefixIndex
from proa_gateway.routing.kv_events import KvFollower, Subscribe
from proa_gateway.routing.policies import make_policy
from proa_gateway.routing.score import AnyCandidate
from proa_gateway.types import Hello, RoutingHints


class Router:
    """One of a gateway's parts. Raises `ValueError` for a policy that is not in `POLICIES`."""

    def __init__(self, policy: str) -> None:
        self.index = PrefixIndex()
        self._policy = make_policy(policy, self.index, random.Random(), time.monotonic)
        self._follower = KvFollower(self.index)

    @property
    def policy(self) -> str:
        return self._policy.name

    @property
    def needs_hashes(self) -> bool:
        """Whether wishes are to name the prompt's blocks."""
        return self._policy.needs_hashes

    def choose(self, candidates: Mapping[str, AnyCandidate], wish: RoutingHints) -> AnyCandidate:
        """One of the candidates, which are given by address, and of which there is one at least."""
        return self._policy.choose(candidates, wish)

    def sent(self, address: str, wish: RoutingHints) -> int:
        """The request is on its way. Returns how many of its prompt's tokens the engine is expected to have cached."""
        return self._policy.sent(address, wish)

    async def follow(self, address: str, hello: Hello, subscribe: Subscribe) -> None:
        """To run beside an engine's session, cancelled at its end."""
        if self._policy.needs_hashes:
            await self._follower.follow(address, hello, subscribe)
