"""Findings: what lowering one grammar has found so far."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Findings:
    """Bounds hold for all JSON schemas and regular expressions of a grammar together."""

    warnings: list[str] = field(default_factory=list)  # what is not enforced, for the client
    regexes: list[str] = field(default_factory=list)
    multiples: list[object] = field(default_factory=list)  # values of multipleOf
    num_pattern_pairs: int = 0
    num_property_pairs: int = 0

    def warn(self, warning: str) -> None:
        if warning not in self.warnings:
            self.warnings.append(warning)
