"""Deletion costs of engine pods, so that a scale-down removes the replica whose cache is used least.

Kubernetes deletes the pods of a ReplicaSet in the order of the annotation `controller.kubernetes.io/pod-deletion-cost`.
"""

import asyncio
from collections import deque
from collections.abc import Collection, Mapping

from proa_gateway.engines.client import EngineClient
from proa_gateway.engines.discovery import Discovery

PERIOD = 60.0  # seconds
NUM_PERIODS = 10


class CacheUse:
    """Prompt tokens that engines found in their caches in the last `NUM_PERIODS` samples. Engines are named by UID."""

    def __init__(self) -> None:
        self._totals: dict[str, int] = {}  # of the last sample
        self._found: dict[str, deque[int]] = {}  # between two samples, the last one last

    def sample(self, totals: Mapping[str, int]) -> Mapping[str, int]:
        """Take a sample of the engines' counters, which start again at zero with the engine. Return the costs of those
        that have been sampled for all periods: several gateways, also one that has just started, write the same ones.

        A cost is the number of bits of the tokens found, so that it changes, and is written, only when these double or
        halve.
        """
        for uid, total in totals.items():
            found = self._found.setdefault(uid, deque(maxlen=NUM_PERIODS))
            if (before := self._totals.get(uid)) is not None:
                found.append(total - before if total >= before else total)
        self._totals = dict(totals)
        self._found = {uid: found for uid, found in self._found.items() if uid in totals}
        return {uid: sum(found).bit_length() for uid, found in self._found.items() if len(found) == NUM_PERIODS}


async def write_deletion_costs(engines: Collection[EngineClient], discovery: Discovery) -> None:
    """Annotate the pods of engines with a session once in `PERIOD`, until cancelled. `engines`: a live view."""
    use = CacheUse()
    while True:
        totals = {one.uid: one.load_stats.prefix_cache_hits for one in engines if one.hello is not None}
        await discovery.set_deletion_costs(use.sample(totals))
        await asyncio.sleep(PERIOD)
