"""FakeHost: the host's pages and slots, made of lists, as the judge of the copies of each step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from proa_engine.core.types import NO_COPIES, Copies

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
        # Called with pages and slots when copies are complete.
        self.on_copied: Callable[[Copies, Sequence[Content], Sequence[Content]], None] | None = None
        self._copies = NO_COPIES  # those that may still run
        self._pages = _Side("block", [None] * num_pages)
        self._states = _Side("state", [None] * num_states)

    def begin_step(self, copies: Copies, blocks: list[Content], states: list[Content]) -> None:
        self._copies = copies
        self._pages.copy(copies.stores, copies.loads, blocks)
        self._states.copy(copies.state_stores, copies.state_loads, states)
        self.num_stored += len(copies.stores)
        self.num_loaded += len(copies.loads)

    def end_step(self, blocks: list[Content], states: list[Content]) -> None:
        self._pages.end(blocks)
        self._states.end(states)
        copies, self._copies = self._copies, NO_COPIES
        if copies and self.on_copied is not None:
            self.on_copied(copies, self._pages.host, self._states.host)

    def fill(self, page: int, content: Content) -> None:
        """Write a page, as a mover does, while no copy may use it."""
        used = {*(target for _, target in self._copies.stores), *(source for source, _ in self._copies.loads)}
        assert page not in used, f"page {page} is written while copies may use it"
        self._pages.host[page] = _copied(content)

    def fill_state(self, slot: int, content: Content) -> None:
        used = {*(target for _, target in self._copies.state_stores), *(each for each, _ in self._copies.state_loads)}
        assert slot not in used, f"slot {slot} is written while copies may use it"
        self._states.host[slot] = _copied(content)


def _copied(content: Content) -> Content:
    return list(content) if isinstance(content, list) else content
