"""Analyse a profile of kernel launches: time by kernel, and gaps in which no kernel runs."""

import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

_TOP = 25  # kernels in a table


class Span(NamedTuple):
    """One launch; times in microseconds, from an arbitrary origin."""

    name: str
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Kernel:
    name: str
    calls: float  # a step
    microseconds: float  # a step, without the time that an earlier kernel ran too
    gap: float  # mean idle microseconds before a launch


@dataclass(frozen=True, slots=True)
class Profile:
    """Microseconds a step."""

    kernels: list[Kernel]  # by time, longest first
    busy: float  # at least one kernel runs
    gaps: float  # no kernel runs
    median_gap: float  # between two kernels
    wall: float
    floor: dict[str, float]  # by part of the model


def analyse(spans: Iterable[Span], count: int, wall: float, floor: dict[str, float]) -> Profile:
    """`spans` are the launches of `count` steps. Time before the first one is not a gap.

    They may overlap: a dependent launch starts before the previous kernel ends, and waits. A kernel's time counts from
    the end of all kernels before it, so that the times add up to `busy`.
    """
    calls: dict[str, int] = defaultdict(int)
    times: dict[str, float] = defaultdict(float)
    idle: dict[str, float] = defaultdict(float)
    gaps: list[float] = []
    reached: float | None = None
    for span in sorted(spans, key=lambda span: span.start):
        calls[span.name] += 1
        if reached is None:
            reached = span.start
        else:
            gaps.append(max(0.0, span.start - reached))
            idle[span.name] += gaps[-1]
        times[span.name] += max(0.0, span.end - max(span.start, reached))
        reached = max(reached, span.end)
    kernels = [
        Kernel(name, calls[name] / count, times[name] / count, idle[name] / calls[name])
        for name in sorted(times, key=lambda name: -times[name])
    ]
    return Profile(
        kernels, sum(times.values()) / count, sum(gaps) / count, statistics.median(gaps or [0.0]), wall, floor
    )


def table(profile: Mapping[str, Any]) -> str:
    """Markdown of a `Profile` as a dict."""
    kernels: Sequence[Mapping[str, Any]] = profile["kernels"]
    total, floor = sum(kernel["microseconds"] for kernel in kernels), sum(profile["floor"].values())
    lines = ["| kernel | launches a step | µs a step | share | idle before one, µs |", "|---|---:|---:|---:|---:|"]
    for kernel in kernels[:_TOP]:
        name, share = kernel["name"][:90].replace("|", "¦"), kernel["microseconds"] / max(total, 1e-9)
        lines.append(
            f"| `{name}` | {kernel['calls']:.1f} | {kernel['microseconds']:,.1f} | {share:.1%} | {kernel['gap']:.1f} |"
        )
    calls = sum(kernel["calls"] for kernel in kernels)
    lines.append(f"| all {len(kernels)} | {calls:.1f} | {total:,.1f} | | |")
    parts_of_floor = ", ".join(f"{name} {microseconds:,.0f}" for name, microseconds in profile["floor"].items())
    lines += [
        "",
        f"Wall time {profile['wall']:,.0f} µs a step: kernels run for {profile['busy']:,.0f}, gaps between them are "
        f"{profile['gaps']:,.0f} (median {profile['median_gap']:.1f}). Floor {floor:,.0f} µs, "
        f"{floor / profile['wall']:.0%} of the wall time: {parts_of_floor}.",
    ]
    return "\n".join(lines)
