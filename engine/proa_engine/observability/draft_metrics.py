"""Metrics of draft tokens: accepted ones by place, the room that steps had for them, and how ways to draw compare."""

from collections.abc import Iterator, Mapping

from prometheus_client.core import Metric

from proa_engine.core.counters import DraftCounts
from proa_engine.core.speculation import RANGES, WAYS
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.metric_families import CounterByLabel, Histogram, counter_by_labels, gauge


def accepted_drafts(num_speculative_tokens: int, drafts: DraftCounts) -> CounterByLabel:
    accepted = CounterByLabel("position", map(str, range(num_speculative_tokens)))
    for place, count in enumerate(drafts.num_accepted_per_position):
        accepted.counts[str(place)] = count
    return accepted


def draft_families(
    config: SpeculativeConfig | None, drafts: DraftCounts, labels: Mapping[str, str]
) -> Iterator[Metric]:
    """What the counters of vLLM's names do not tell."""
    if not config:
        return
    text = "Draft tokens of a request in the next step: the number that is measured or scheduled for this load."
    yield gauge("proa_engine_draft_tokens", text, labels, drafts.depth)
    text = "Draft tokens for which a step had room, by step and request."
    planned = Histogram("proa_engine_draft_tokens_planned", text, range(1, config.max_drafts + 1))
    for num_tokens, count in drafts.num_planned.items():
        planned.observe(num_tokens, count)
    yield planned.family(labels)
    matches: dict[tuple[str, ...], float] = {
        (way.name, temperatures): drafts.num_matches.get((number, place), 0)
        for number, way in enumerate(WAYS[config.draft_sample_method] if config.reads_states else ())
        for place, temperatures in enumerate(RANGES)
    }
    text = "Times that a way to draw had the sample as its first draft token, by range of temperatures."
    yield counter_by_labels("proa_engine_draft_matches", text, labels, ("way", "temperature"), matches)
