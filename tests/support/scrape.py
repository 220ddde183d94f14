"""Parse a page of Prometheus metrics."""

from prometheus_client.parser import text_string_to_metric_families

Labels = frozenset[tuple[str, str]]


class Scrape:
    """The samples and metric types of one page."""

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
        """Return the sum of the samples with this name and these labels. Raises KeyError if there are none."""
        wanted = labels.items()
        found = [value for (other, has), value in self.samples.items() if other == name and has >= wanted]
        if not found:
            raise KeyError(f"{name}{labels}")
        return sum(found)
