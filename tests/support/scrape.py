"""Prometheus text as values."""

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Scrape:
    """The samples of one page of metrics."""

    def __init__(self, page: str) -> None:
        self.types = {family.name: family.type for family in text_string_to_metric_families(page)}
        self.samples: dict[tuple[str, Labels], float] = {
            (sample.name, frozenset(sample.labels.items())): sample.value
            for family in text_string_to_metric_families(page)
            for sample in family.samples
        }

    @property
    def names(self) -> set[str]:
        return {name for name, _ in self.samples}

    def value(self, name: str, **labels: str) -> float:
        """The sum of the samples of this name that have these labels. Raises KeyError where there is none."""
        wanted = labels.items()
        found = [value for (other, has), value in self.samples.items() if other == name and has >= wanted]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)
