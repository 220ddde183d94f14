"""Bounds on what a JSON schema costs to compile, on what it costs an engine to compute its masks, and on how deeply
llguidance recurses in it, references included: it overflows the stack otherwise.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from math import lcm
from urllib.parse import unquote

from proa.grammar.check import GrammarError
from proa.grammar.lark import check_regexes

# llguidance 1.9.1 on one core; it has no limits of its own on these.
MAX_MULTIPLE_OF = 10_000  # 9,973: 130 ms; 99,991: 2.5 s; 999,983: 7.3 s
MAX_ROUND_MULTIPLE_OF = 100  # times a power of ten, which costs little: 7 * 10^7: 4 ms; 9,999 * 10^4: 16 s
MAX_OBJECT_CHOICES = 2000  # 130 ms
MAX_PROPERTY_PAIRS = 2000**2  # sum of squares of the numbers of optional properties: 460 ms; 10,000**2: 16 s
MAX_PATTERN_PAIRS = 4096  # sum of squares of the numbers of patternProperties, of which each two are compared: 120 ms

# With a stack of 8 MiB, llguidance 1.9.1 crashes at 1,600 levels and more. Of 11,305 published schemas, one is
# refused for this.
MAX_LEVELS = 1000

Container = dict[str, object] | list[object]


@dataclass(slots=True)
class Findings:
    """Bounds hold for all JSON schemas and regular expressions of a grammar together."""

    warnings: dict[str, None] = field(default_factory=dict)  # what is not enforced, for the client, in order
    regexes: list[str] = field(default_factory=list)
    multiples: list[object] = field(default_factory=list)  # values of multipleOf
    num_pattern_pairs: int = 0
    num_property_pairs: int = 0

    def warn(self, warning: str) -> None:
        self.warnings[warning] = None


def check_bounds(objects: Sequence[dict[str, object]], findings: Findings) -> None:
    """`objects`: all of the schema, whatever they stand for, because a reference may lead to any of them."""
    findings.regexes += [pattern for value in objects if isinstance(pattern := value.get("pattern"), str)]
    for value in objects:
        if isinstance(choices := value.get("enum"), list):
            count = sum(isinstance(each, (dict, list)) for each in choices)
            if count > MAX_OBJECT_CHOICES:
                raise GrammarError(
                    f"enum must hold at most {MAX_OBJECT_CHOICES} objects and arrays, this one has {count}"
                )
        if isinstance(properties := value.get("properties"), Mapping):
            findings.num_property_pairs += _num_optional(properties, value.get("required")) ** 2
        if isinstance(properties := value.get("patternProperties"), Mapping):
            findings.regexes += properties
            findings.num_pattern_pairs += len(properties) ** 2
    check_regexes(findings.regexes)
    if findings.num_pattern_pairs > MAX_PATTERN_PAIRS:
        raise GrammarError("the JSON schema has too many patternProperties")
    if findings.num_property_pairs > MAX_PROPERTY_PAIRS:
        raise GrammarError("the JSON schema has too many optional properties")
    findings.multiples += [value["multipleOf"] for value in objects if "multipleOf" in value]
    _check_multiples(findings.multiples)


def _num_optional(properties: Mapping[str, object], required: object) -> int:
    names = required if isinstance(required, list) else []
    return len(properties.keys() - {name for name in names if isinstance(name, str)})


def _check_multiples(values: list[object]) -> None:
    """Bound the least common multiple, because schemas with different ones may be intersected."""
    numbers = [abs(Decimal(repr(value))) for value in values if isinstance(value, (int, float)) and value]
    integers = [int(number.scaleb(9)) for number in numbers if 1e-9 <= number <= 1e10]  # llguidance refuses others
    unit = min([10**9, *map(_power_of_ten, integers)])
    multiple = lcm(*(number // unit for number in integers))
    round_multiple = lcm(*(number // _power_of_ten(number) for number in integers))
    if multiple > MAX_MULTIPLE_OF and round_multiple > MAX_ROUND_MULTIPLE_OF:
        raise GrammarError(
            f"multipleOf is supported up to {MAX_MULTIPLE_OF}, as an integer and as the least common multiple of all"
        )


def _power_of_ten(number: int) -> int:
    """The largest power of ten that divides the number, which is not 0."""
    power = 1
    while number % (power * 10) == 0:
        power *= 10
    return power


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
