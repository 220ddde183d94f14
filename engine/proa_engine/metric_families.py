"""Prometheus metric families made from plain numbers, and a histogram that counts equal values in one call."""

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily


class Histogram:
    """Counts of observed values by bucket, and their sum. Not thread-safe."""

    def __init__(self, name: str, text: str, bounds: Sequence[float]) -> None:
        """`text` is the help; `bounds` are the buckets' upper bounds, without +Inf."""
        self._name = name
        self._text = text
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)  # the last is +Inf
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `value`, `count` times."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, labels: Mapping[str, str], name: str | None = None) -> HistogramMetricFamily:
        """The metric as prometheus_client renders it, under its own name or another."""
        buckets: list[tuple[str, float]] = []
        total = 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(float(bound)), total))
        family = HistogramMetricFamily(name or self._name, self._text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), buckets, self._sum)
        return family


class CounterByLabel:
    """Counters by the value of one label. `values` are present, with a count of zero, from the start."""

    def __init__(self, label: str, values: Iterable[str] = ()) -> None:
        self.label = label
        self.counts = Counter(dict.fromkeys(values, 0))


def gauge(name: str, text: str, labels: Mapping[str, str], value: float) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, text, labels=tuple(labels))
    family.add_metric(tuple(labels.values()), value)
    return family


def gauge_by_label(
    name: str, text: str, labels: Mapping[str, str], label: str, values: Mapping[str, float]
) -> GaugeMetricFamily:
    """A sample for each of `values`, by the value of one more label."""
    family = GaugeMetricFamily(name, text, labels=(*labels, label))
    for label_value, value in values.items():
        family.add_metric((*labels.values(), label_value), value)
    return family


def counter_by_labels(
    name: str, text: str, labels: Mapping[str, str], names: Sequence[str], values: Mapping[tuple[str, ...], float]
) -> CounterMetricFamily:
    """A sample for each of `values`, by the values of the further labels `names`."""
    family = CounterMetricFamily(name, text, labels=(*labels, *names))
    for label_values, value in values.items():
        family.add_metric((*labels.values(), *label_values), value)
    return family


def counter(name: str, text: str, labels: Mapping[str, str], value: float | CounterByLabel) -> CounterMetricFamily:
    if not isinstance(value, CounterByLabel):
        family = CounterMetricFamily(name, text, labels=tuple(labels))
        family.add_metric(tuple(labels.values()), value)
        return family
    family = CounterMetricFamily(name, text, labels=(*labels, value.label))
    for label_value, count in value.counts.items():
        family.add_metric((*labels.values(), label_value), count)
    return family
