"""A bound on how deeply llguidance recurses in a JSON schema, references included: it overflows the stack otherwise."""

from collections.abc import Sequence
from urllib.parse import unquote

from proa.grammar.check import GrammarError

# With a stack of 8 MiB, llguidance 1.9.1 crashes at 1,600 levels and more. Of 11,305 published schemas, one is
# refused for this.
MAX_LEVELS = 1000

Container = dict[str, object] | list[object]


def check_levels(containers: Sequence[tuple[Container, int]]) -> None:
    """`containers`: all of a schema, each with the index of its holder, which is before it; the root first.

    A reference continues the recursion in its target, each target once. So the sum of all targets' heights is a bound,
    whatever the order.
    """
    heights = [1] * len(containers)
    for index in range(len(containers) - 1, 0, -1):
        parent = containers[index][1]
        heights[parent] = max(heights[parent], heights[index] + 1)
    objects = [value for value, _ in containers if isinstance(value, dict)]
    references = [reference for value in objects if isinstance(reference := value.get("$ref"), str)]
    if any(isinstance(value.get(name), str) for value in objects[1:] for name in ("$id", "id")):
        levels = heights[0] * (len(references) + 1)  # what a reference leads to depends on where it stands
    else:
        by_identity = {id(value): height for (value, _), height in zip(containers, heights, strict=True)}
        targets = [resolve(objects[0], reference) for reference in set(references)]
        levels = heights[0] + sum(by_identity.get(id(target), heights[0]) for target in targets)
    if levels > MAX_LEVELS:
        raise GrammarError(f"the JSON schema has {levels} levels, $ref included; at most {MAX_LEVELS} are supported")


def resolve(root: dict[str, object], reference: str) -> object:
    """What a reference into the same schema leads to. None: it is not a JSON pointer, or leads nowhere."""
    if not reference.startswith("#"):
        return None
    target: object = root
    for segment in filter(None, unquote(reference[1:]).split("/")):
        if isinstance(target, dict):
            target = target.get(segment.replace("~1", "/").replace("~0", "~"))
        elif isinstance(target, list) and segment.isdecimal() and len(segment) < 7 and int(segment) < len(target):
            target = target[int(segment)]
        else:
            return None
    return target
