"""FakeHost: the host's pages and slots, made of lists, as the judge of the copies of each step."""

from dataclasses import dataclass, field
from typing import Any

from proa_engine.core.types import Copies

Content = Any  # of a block, a page or a slot; None: nothing
Pairs = list[tuple[int, int]]


@dataclass
class _Side:
    """Blocks and pages, or slots of both."""

    name: str
    host: list[Content]
    _early: list[tuple[int, Content]] = field(default_factory=list)  # what the step must leave as it is

    def copy(self, stores: Pairs, loads: Pairs, device: list[Content]) -> None:
        """Run the copies as early as they may."""
        stored, pages = [source for source, _ in stores], [target for _, target in stores]
        sources, targets = [source for source, _ in loads], [target for _, target in loads]
        assert len({*targets, *stored}) == len(targets) + len(set(stored)), f"a {self.name} is loaded and stored"
        assert len(set(pages)) == len(pages), f"two {self.name}s are stored in one page"
        assert not {*pages} & {*sources}, f"a page is written in the step that loads it: {pages}, {sources}"
        for source, target in loads:
            assert self.host[source] is not None, f"page {source} is loaded and holds nothing"
            device[target] = _copied(self.host[source])
        self._early = [(block_id, _copied(device[block_id])) for block_id in [*stored, *targets]]
        for source, target in stores:
            self.host[target] = _copied(device[source])

    def end(self, device: list[Content]) -> None:
        """The copies might run only now, so the step must not have changed what they read or write."""
        for block_id, content in self._early:
            assert device[block_id] == content, f"{self.name} {block_id} was written by the step that copies it"
        self._early = []


class FakeHost:
    """Copies run between the end of the step before and the start of the step after theirs: here as early as possible,
    and what they read and write is compared as late as possible.
    """

    def __init__(self, num_pages: int, num_states: int) -> None:
        self.num_stored = 0
        self.num_loaded = 0
        self._pages = _Side("block", [None] * num_pages)
        self._states = _Side("state", [None] * num_states)

    def begin_step(self, copies: Copies, blocks: list[Content], states: list[Content]) -> None:
        self._pages.copy(copies.stores, copies.loads, blocks)
        self._states.copy(copies.state_stores, copies.state_loads, states)
        self.num_stored += len(copies.stores)
        self.num_loaded += len(copies.loads)

    def end_step(self, blocks: list[Content], states: list[Content]) -> None:
        self._pages.end(blocks)
        self._states.end(states)


def _copied(content: Content) -> Content:
    return list(content) if isinstance(content, list) else content
