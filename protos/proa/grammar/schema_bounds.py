"""Bounds on what a JSON schema costs to compile, and on what it costs an engine to compute its masks."""

from collections.abc import Mapping, Sequence
from decimal import Decimal
from math import lcm

from proa.grammar.check import GrammarError
from proa.grammar.findings import Findings
from proa.grammar.lark import check_regexes

# llguidance 1.9.1 on one core; it has no limits of its own on these.
MAX_MULTIPLE_OF = 10_000  # 9,973: 130 ms; 99,991: 2.5 s; 999,983: 7.3 s
MAX_ROUND_MULTIPLE_OF = 100  # times a power of ten, which costs little: 7 * 10^7: 4 ms; 9,999 * 10^4: 16 s
MAX_OBJECT_CHOICES = 2000  # 130 ms
MAX_PROPERTY_PAIRS = 2000**2  # sum of squares of the numbers of optional properties: 460 ms; 10,000**2: 16 s
MAX_PATTERN_PAIRS = 4096  # sum of squares of the numbers of patternProperties, of which each two are compared: 120 ms


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
