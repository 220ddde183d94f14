"""What a core has counted since its start and what its cache holds, for metrics and the log."""

from collections import Counter
from dataclasses import dataclass, field

from proa_engine.core.types import CacheOccupancy


@dataclass(slots=True)
class DraftCounts:
    """Drafts that were verified, and the room that they had."""

    num_drafts: int = 0  # times that a request had drafts in a step
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    # The first draft's place first, as far as any was accepted.
    num_accepted_per_position: list[int] = field(default_factory=list)
    depth: int = 0  # draft tokens of a request in the next step
    # By number of tokens: times that a step had room for so many draft tokens of a request.
    num_planned: Counter[int] = field(default_factory=Counter)
    # By way to draw and range of temperatures: times that the way's first draft token was the sample.
    num_matches: Counter[tuple[int, int]] = field(default_factory=Counter)


@dataclass(frozen=True, slots=True)
class EncoderCounts:
    """Images or audios."""

    num_encoded: int = 0
    num_hits: int = 0  # times that a request found its one encoded


@dataclass(frozen=True, slots=True)
class CoreCounters:
    cache: CacheOccupancy = field(default_factory=CacheOccupancy)
    num_deferred_reqs: int = 0  # now: waiting ones that could not start if there were room
    num_forced_tokens: int = 0  # output tokens that a grammar left no choice for
    drafts: DraftCounts = field(default_factory=DraftCounts)
    images: EncoderCounts = field(default_factory=EncoderCounts)
    audios: EncoderCounts = field(default_factory=EncoderCounts)  # for tokens in prompts, and for cross-attention
