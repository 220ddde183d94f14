"""What a benchmark of sessions shows beside the figures of every benchmark: turns, and the share of prompts that was
cached beside the share that could have been."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from proa_cli.bench.client import Sample
from proa_cli.bench.metrics import Row, Section


@dataclass(frozen=True, slots=True)
class SessionSample:
    """`turn`: from 0. `tokens_before`: of the prompt of the turn before, which the server has computed; for a first
    turn those of the text that all sessions share."""

    session: int
    turn: int
    tokens_before: int
    sample: Sample


def session_sections(
    turns: Sequence[SessionSample], one_shots: Sequence[Sample], seconds: float
) -> tuple[Section, ...]:
    good = [each for each in turns if not each.sample.error]
    prompts = sum(each.sample.prompt_tokens for each in good) or 1
    cached = sum(each.sample.cached_tokens for each in good) / prompts
    ideal = sum(min(each.tokens_before, each.sample.prompt_tokens) for each in good) / prompts
    rows = (
        Row("Sessions", "sessions", len({each.session for each in turns})),
        Row("Turns", "turns", len(good)),
        Row("Turns a minute", "turns_per_minute", len(good) / seconds * 60),
        Row("Cached share of prompts", "cached_share", cached),
        Row("Share that an endless cache has", "ideal_cached_share", ideal),
        Row("Cached of what could be", "cached_of_ideal", cached / ideal if ideal else 0.0),
    )
    first, later = ([each.sample for each in good if bool(each.turn) is is_later] for is_later in (False, True))
    return (
        Section("Sessions", rows),
        Section("Time to First Token: first turns", _ttft("first_turns", first)),
        Section("Time to First Token: later turns", _ttft("later_turns", later)),
        *([Section("Time to First Token: one-shot prompts", _ttft("one_shots", one_shots))] if one_shots else ()),
    )


def _ttft(key: str, samples: Sequence[Sample]) -> tuple[Row, ...]:
    values = np.array([sample.ttft for sample in samples if not sample.error] or [0.0]) * 1e3
    shares = (("Median", "median", 50), ("P90", "p90", 90), ("P99", "p99", 99), ("Longest", "max", 100))
    return tuple(
        Row(f"{label} TTFT (ms)", f"{name}_ttft_{key}_ms", float(np.percentile(values, share)))
        for label, name, share in shares
    )
