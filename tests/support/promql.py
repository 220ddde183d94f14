"""Parse PromQL, and list what an expression needs of the series that it selects."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import promql_parser as promql


@dataclass(frozen=True)
class Selector:
    """A metric in an expression, its matchers as label -> (operator, value), and the labels that group its series."""

    metric: str
    matchers: Mapping[str, tuple[promql.MatchOp, str]]
    grouped_by: frozenset[str]

    def label_values(self, label: str) -> list[str]:
        """The values that the matcher of the label accepts; one whose value is a Grafana variable accepts any."""
        operator, value = self.matchers[label]
        if operator == promql.MatchOp.Equal:
            return [value]
        return value.split("|") if operator == promql.MatchOp.Re and "$" not in value else []


def selectors(expression: str) -> Iterator[Selector]:
    """The selectors of an expression, which may have Grafana's interval. Raises ValueError if it cannot be parsed."""
    root = promql.parse(expression.replace("$__rate_interval", "5m"))
    groupings: list[list[str]] = []  # of the aggregations around the current node
    found: list[Selector] = []

    def enter(node: promql.Expr) -> None:
        if isinstance(node, promql.AggregateExpr):
            groupings.append(node.modifier.labels if node.modifier else [])
        if isinstance(node, promql.VectorSelector):
            matchers = {each.name: (each.op, each.value) for each in node.matchers.matchers}
            assert node.name is not None, f"a selector without a metric: {expression}"
            found.append(Selector(node.name, matchers, frozenset(label for labels in groupings for label in labels)))

    def leave(node: promql.Expr) -> None:
        if isinstance(node, promql.AggregateExpr):
            groupings.pop()

    promql.walk(root, pre_visit=enter, post_visit=leave)
    yield from found
