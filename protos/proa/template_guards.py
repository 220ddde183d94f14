"""Guards in the syntax tree of a chat template: filters that charge what grows and look at the clock.

They surround the longest expressions of `+` and `~`, slices, literals of containers and what loops iterate. At least
one of them runs for every `MAX_UNTIMED_NODES` nodes that are evaluated. Intercepting each `+`, which Jinja offers,
would cost a tenth of a rendering.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain, islice
from typing import Any, Final

from jinja2 import nodes, pass_context
from jinja2.runtime import Context

from proa.template_budget import TemplateTooCostly, copied, current, grown

MAX_UNTIMED_NODES: Final = 256
MAX_INT_BITS: Final = 4096
"""Of integers in a template and of products: dividing integers takes time by the square of their length."""
# Names that no template can use.
_GROWN, _COPIED, _TIMED, _STEPS = "proa: grown", "proa: copied", "proa: timed", "proa: steps"
_GROWING = (nodes.Add, nodes.Concat)
_LITERALS = (nodes.List, nodes.Tuple, nodes.Dict)
_CONSTANTS = (nodes.Const, nodes.Pair, *_LITERALS)


def add_guards(template: nodes.Template) -> None:
    """Raises `TemplateTooCostly`, and `RecursionError` for nodes within too many others."""
    _guard_fields(template)


def _guard_fields(node: nodes.Node) -> int:
    """Guard what is in a node. Return the number of its nodes between which no guard looks at the clock."""
    if isinstance(node, nodes.Const) and isinstance(node.value, int) and node.value.bit_length() > MAX_INT_BITS:
        raise TemplateTooCostly("it has a number with too many digits")
    weight = 1
    branches = [0]
    for name, value in node.iter_fields():
        if isinstance(node, nodes.If) and isinstance(value, list):
            branches.append(_guard_elifs(value) if name == "elif_" else _guard_list(value, node))
        elif isinstance(value, nodes.Node):
            guarded, added = _guard(value, node)
            setattr(node, name, guarded)
            weight += added
        elif isinstance(value, list):
            weight += _guard_list(value, node)
    weight += max(branches)
    if isinstance(node, nodes.For):
        node.iter = _filter(node.iter, _STEPS, nodes.Const(max(1, MAX_UNTIMED_NODES // weight)))
    return weight


def _guard_list(values: list[Any], parent: nodes.Node) -> int:
    """Guard statements, with looks at the clock between them, or expressions."""
    weight = 0
    guarded: list[Any] = []
    for value in values:
        if isinstance(value, nodes.Node):
            value, added = _guard(value, parent)
            if isinstance(value, nodes.Stmt) and weight + added > MAX_UNTIMED_NODES:
                guarded.append(nodes.ExprStmt(_filter(nodes.Const(None), _TIMED), lineno=value.lineno))
                weight = 0
            weight = min(weight + added, MAX_UNTIMED_NODES) if isinstance(value, nodes.Stmt) else weight + added
        guarded.append(value)
    values[:] = guarded
    return weight


def _guard_elifs(elifs: list[nodes.If]) -> int:
    weight = 0
    for each in elifs:
        weight += _guard_fields(each)
        if weight > MAX_UNTIMED_NODES:
            each.test = _filter(each.test, _GROWN)
            weight = 0
    return weight


def _guard(node: nodes.Node, parent: nodes.Node) -> tuple[nodes.Node, int]:
    """Return what takes the place of a node, and its weight."""
    weight = _guard_fields(node)
    if not isinstance(node, nodes.Expr) or isinstance(node, nodes.Slice) or getattr(node, "ctx", "load") != "load":
        return node, weight
    grows = isinstance(node, _GROWING) or (isinstance(node, _LITERALS) and not _is_constant(node))
    if (grows and not isinstance(parent, _GROWING)) or weight > MAX_UNTIMED_NODES // 4:
        return _filter(node, _GROWN), 1
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _filter(node, _COPIED), 1
    return node, weight


def _filter(node: nodes.Node, name: str, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(node, name, list(args), [], None, None, lineno=node.lineno)


def _is_constant(literal: nodes.Node) -> bool:
    return all(isinstance(node, _CONSTANTS) for node in literal.find_all(nodes.Node))


@pass_context  # else it would be taken for a constant
def _timed(context: Context, value: Any) -> Any:
    current.get().spend(0)
    return value


class _Steps:
    """Items between which the clock is looked at, `stride` of them at a time."""

    __slots__ = ("_items", "_stride")

    def __init__(self, items: Any, stride: int) -> None:
        self._items = items
        self._stride = stride

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return chain.from_iterable(_chunks(iter(self._items), self._stride))


def steps(items: Any, stride: int = 1) -> Any:
    """What a loop iterates in place of `items`."""
    current.get().spend(0)
    try:
        return items if len(items) <= stride else _Steps(items, stride)
    except TypeError:  # a generator, or nothing that can be iterated
        return chain.from_iterable(_chunks(iter(items), stride))


def _chunks(items: Iterator[Any], stride: int) -> Iterable[tuple[Any, ...]]:
    while chunk := tuple(islice(items, stride)):
        current.get().spend(0)
        yield chunk


GUARDS: Final[Mapping[str, Callable[..., Any]]] = {_GROWN: grown, _COPIED: copied, _TIMED: _timed, _STEPS: steps}
"""Filters of the environment, by name."""
