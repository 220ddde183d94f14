"""Command-line flags from the fields of configuration dataclasses.

A field declares its default, help text and limits once:

    @dataclass(frozen=True, kw_only=True)
    class Config:
        port: int = option(8000, "port to listen on", minimum=0, maximum=65535)
        models: tuple[str, ...] = option((), "model name; repeat for several", flag="--model")

        def __post_init__(self) -> None:
            check_options(self)

`add_options` adds one flag for each field to a parser, and `from_arguments` builds the dataclass from the result, and
from environment variables for the flags that were not given. The field's type gives the flag's: `bool` becomes `--name`
and `--no-name`, `Literal` the choices, `tuple` a flag that can be repeated and takes several values, a dataclass an
argument group of its own fields. `X | None` is parsed as `X`. `Parser` is argparse's, with a suggestion for a flag that
it does not know.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from decimal import Decimal
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

from proa.environment import read_switch, split, value_of, variable_of, warnings

T = TypeVar("T")
MASK = "***"
_SECRET = re.compile(r"(?:.*[_-])?(?:api)?(?:key|token|secret|password)s?", re.IGNORECASE)
REQUIRED: Any = MISSING
"""The default of an option that must be given."""
_COUNT = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_COUNT_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """What a field declares besides its type and default. See `option`."""

    help: str
    flag: str | None
    short: str | None
    metavar: str | None
    parse: Callable[[str], Any] | None
    choices: Sequence[str] | None
    minimum: float | None
    maximum: float | None
    exclusive: str | None
    internal: bool

    def flag_of(self, name: str) -> str:
        """The long flag of the field `name`."""
        return self.flag or "--" + name.replace("_", "-")


def option(
    default: T,
    help: str,
    *,
    flag: str | None = None,
    short: str | None = None,
    metavar: str | None = None,
    parse: Callable[[str], Any] | None = None,
    choices: Sequence[str] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
    exclusive: str | None = None,
    internal: bool = False,
) -> T:
    """Declare a dataclass field that is also a command-line flag. `default` must be hashable.

    `flag`: instead of `--field-name`. `short`: a flag of one letter beside it. `parse`: converts the flag's text,
    raising `ValueError` with the message to show; for a tuple, one element. `choices`, `minimum` and `maximum` are
    checked by `check_options`. `exclusive`: exactly one of the flags with this name must be given. `internal`: no flag;
    only code and tests set the field.
    """
    declared = Option(
        help=help,
        flag=flag,
        short=short,
        metavar=metavar,
        parse=parse,
        choices=choices,
        minimum=minimum,
        maximum=maximum,
        exclusive=exclusive,
        internal=internal,
    )
    return field(default=default, metadata={"option": declared})


def options(config: type) -> list[tuple[Field[Any], Option]]:
    """The fields of a dataclass with their options. Raises `TypeError` for a field without one."""
    for each in fields(config):
        if "option" not in each.metadata:
            raise TypeError(f"{config.__name__}.{each.name} is not declared with option()")
    return [(each, each.metadata["option"]) for each in fields(config)]


def check_options(config: Any) -> None:
    """Raise `ValueError` naming the first field that is not one of its choices, or outside its range."""
    hints = get_type_hints(type(config))
    for each, declared in options(type(config)):
        value = getattr(config, each.name)
        if value is not None:
            _check(each.name, value, declared, _without_none(hints[each.name]))


def parse_count(text: str) -> int:
    """A number of tokens or bytes as vLLM reads it: 32k is 32,000, 32K is 32,768, 25.6k is 25,600; also m, g and t.
    Raises `ValueError`."""
    text = text.strip()
    match = _COUNT.fullmatch(text)
    if match is None:
        try:
            return int(text)
        except ValueError:
            raise ValueError(f"{text!r} is not a number such as 4096, 32k (32,000) or 32K (32,768)") from None
    number, unit = match.groups()
    power = _COUNT_POWERS[unit.lower()]
    if unit.islower():
        return int(Decimal(number) * 1000**power)
    if "." in number:
        raise ValueError(f"{text!r}: {unit} takes whole numbers; did you mean {number}{unit.lower()}?")
    return int(number) * int(1024**power)


def flat(config: Any) -> dict[str, Any]:
    """The values of a dataclass by field name, with those of a group, a dataclass in it, in the group's place."""
    groups, values = _groups(type(config)), dict[str, Any]()
    for each in fields(config):
        value = getattr(config, each.name)
        values |= flat(value) if each.name in groups else {each.name: value}
    return values


def from_flat(config: type[T], values: Mapping[str, Any]) -> T:
    """Build the dataclass and its groups from values by field name, as `flat` returns them. Raises `TypeError` for a
    name that no field has, and `ValueError` where a dataclass does."""
    own, groups = dict(values), dict[str, Any]()
    for name, group in _groups(config).items():
        groups[name] = from_flat(group, {each: own.pop(each) for each in flat_hints(group) if each in own})
    return config(**own, **groups)


def flat_hints(config: type) -> dict[str, Any]:
    """The types of the values that `flat` returns, by field name."""
    groups, hints = _groups(config), dict[str, Any]()
    for name, hint in get_type_hints(config).items():
        hints |= flat_hints(groups[name]) if name in groups else {name: hint}
    return hints


def masked(value: Any, *, name: str = "") -> Any:
    """A copy of a configuration as JSON has it, with `MASK` for each text in a field that is named as a key, token,
    secret or password. Numbers, flags and paths stay. `name`: of the field that has the value."""
    if is_dataclass(value):
        value = {each.name: getattr(value, each.name) for each in fields(value)}
    if isinstance(value, Mapping):
        return {key: masked(inner, name=name if is_secret(name) else str(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [masked(inner, name=name) for inner in value]
    return MASK if isinstance(value, str | bytes) and value and is_secret(name) else value


def masked_repr(config: Any) -> str:
    """The `__repr__` of a configuration that has secrets, which errors and logs may then show."""
    values = {each.name: getattr(config, each.name) for each in fields(config)}
    shown = {name: masked(value, name=name) if is_secret(name) else value for name, value in values.items()}
    return f"{type(config).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"


def is_secret(name: str) -> bool:
    return _SECRET.fullmatch(name) is not None


class Parser(argparse.ArgumentParser):
    """Errors are one line, without the list of flags in front. An unknown flag gets a suggestion."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Exit for unknown arguments, as `parse_args` does. A command's own parser knows the flags to suggest; the
        parser around it, which would report them, does not."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(self._shown(unknown))}; {self._hint(unknown)}")
        return parsed, unknown

    def error(self, message: str) -> NoReturn:
        message = message.replace("ignored explicit argument", "takes no value, got")  # such as --enforce-eager=true
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _shown(self, unknown: Sequence[str]) -> Iterator[str]:
        """Yield the arguments with masks for the values of flags that are named like a secret, or resemble such a
        flag."""
        masks = False
        for each in unknown:
            if each.startswith("--"):
                flag, equals, _ = each.partition("=")
                masks = any(is_secret(name.lstrip("-")) for name in (flag, *self._close(flag)))
                yield f"{flag}={MASK}" if equals and masks else each
            else:
                yield MASK if masks else each

    def _close(self, flag: str) -> list[str]:
        """The flag that is most like this one, if there is one."""
        flags = [each for each in self._option_string_actions if each.startswith("--")]
        return difflib.get_close_matches(flag.replace("_", "-"), flags, n=1)

    def _hint(self, unknown: Sequence[str]) -> str:
        close = [match for each in unknown if each.startswith("--") for match in self._close(each.partition("=")[0])]
        return f"did you mean {', '.join(close)}?" if close else f"{self.prog} --help lists all"


@dataclass(frozen=True, slots=True)
class _Default:
    """The value of a flag that was not given."""

    value: Any

    def __str__(self) -> str:
        return ",".join(map(str, self.value)) if isinstance(self.value, tuple) else str(self.value)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None and (): the help text explains those."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        default = action.default.value if isinstance(action.default, _Default) else action.default
        return action.help if default in (None, (), MISSING) else super()._get_help_string(action)


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add the flags of a dataclass and of the dataclasses in it. The parser should use `HelpFormatter`."""
    _add(parser, parser, config, "")


def from_arguments(config: type[T], arguments: argparse.Namespace, environment: Mapping[str, str] | None = None) -> T:
    """Build the dataclass from parsed arguments, and from the variables of flags that were not given. Raises
    `ValueError` where it does, for a flag that is required, and for a variable, which is named.

    A field of type `D | None`, `D` a dataclass, is None if none of its flags was given.
    """
    return _Builder(arguments, environment or {}).build(config, "")


def environment_warnings(config: type, environment: Mapping[str, str]) -> list[str]:
    """Return a sentence for each variable that is probably meant for a flag of the dataclass and sets none."""
    return list(warnings({variable_of(flag) for flag in flags(config)}, environment).values())


def flags(config: type) -> Iterator[str]:
    """The long flags of a dataclass, and of the dataclasses in it."""
    hints = get_type_hints(config)
    for each, declared in options(config):
        hint = _without_none(hints[each.name])
        if _is_nested(declared, hint) and not declared.internal:
            yield from flags(hint)
        elif not declared.internal:
            yield declared.flag_of(each.name)


def _add(parser: argparse.ArgumentParser, group: Any, config: type, prefix: str) -> None:
    hints = get_type_hints(config)
    exclusive: dict[str, Any] = {}
    for each, declared in options(config):
        hint, path = _without_none(hints[each.name]), prefix + each.name
        if declared.internal:
            continue
        if _is_nested(declared, hint):
            _add(parser, parser.add_argument_group(declared.help), hint, path + ".")
            continue
        target = group
        if declared.exclusive is not None:
            target = exclusive.get(declared.exclusive) or group.add_mutually_exclusive_group()
            exclusive[declared.exclusive] = target
        flag = declared.flag_of(each.name)
        names = [flag] if declared.short is None else [declared.short, flag]
        target.add_argument(*names, dest=path, **_argument_settings(flag, each, declared, hint))


def _argument_settings(flag: str, each: Field[Any], declared: Option, hint: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"help": declared.help.replace("%", "%%"), "default": _Default(each.default)}
    if hint is bool and declared.parse is None:
        return result | {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        result |= {"action": "extend", "nargs": "+", "default": None}
        hint = get_args(hint)[0]
    if (choices := _choices(declared, hint)) is not None:
        return result | {"choices": choices}
    metavar = declared.metavar or flag.lstrip("-").upper().replace("-", "_")
    return result | {"metavar": metavar, "type": hint if declared.parse is None else _with_message(declared.parse)}


@dataclass(frozen=True, slots=True)
class _Builder:
    """Builds dataclasses from what the command line has, then from the environment, then from the defaults."""

    arguments: argparse.Namespace
    environment: Mapping[str, str]

    def build(self, config: type[T], prefix: str) -> T:
        hints, declarations = get_type_hints(config), options(config)
        decided = {declared.exclusive for each, declared in declarations if self._is_given(prefix + each.name)} - {None}
        values: dict[str, Any] = {}
        for each, declared in declarations:
            hint, path = _without_none(hints[each.name]), prefix + each.name
            if declared.internal:
                continue
            if _is_nested(declared, hint):
                value = self.build(hint, path + ".")
                values[each.name] = None if each.default is None and value == hint() else value
                continue
            variable = variable_of(declared.flag_of(each.name))
            if self._is_given(path):
                value = getattr(self.arguments, path)
                values[each.name] = tuple(value) if get_origin(hint) is tuple else value
            elif declared.exclusive in decided:
                continue
            elif (text := value_of(variable, self.environment)) is not None:
                values[each.name] = _read_variable(variable, text, declared, hint)
            elif each.default is MISSING:
                raise ValueError(f"the flag {declared.flag_of(each.name)} is required")
        _check_exclusive(declarations, values)
        return config(**values)

    def _is_given(self, path: str) -> bool:
        value = getattr(self.arguments, path, None)
        return value is not None and not isinstance(value, _Default)


def _check_exclusive(declarations: Sequence[tuple[Field[Any], Option]], values: Mapping[str, Any]) -> None:
    """Raise `ValueError` unless `values` has exactly one field of each group of those that exclude each other."""
    groups: dict[str, dict[str, bool]] = {}  # flag -> whether it is in `values`
    for each, declared in declarations:
        if declared.exclusive is not None:
            groups.setdefault(declared.exclusive, {})[declared.flag_of(each.name)] = each.name in values
    for flags in groups.values():
        given = [variable_of(flag) for flag, is_given in flags.items() if is_given]
        if not given:
            raise ValueError(f"one of the flags {' '.join(flags)} is required")
        if len(given) > 1:  # of flags, the parser has refused that
            raise ValueError(f"the variables {' and '.join(given)} exclude each other")


def _read_variable(variable: str, text: str, declared: Option, hint: Any) -> Any:
    """Convert a variable's text for a field of type `hint`. Raises `ValueError` that names the variable."""
    name, is_tuple = f"the variable {variable}", get_origin(hint) is tuple
    try:
        parse = declared.parse or _parse_by_type(get_args(hint)[0] if is_tuple else hint)
        # A key may have commas, and clients send the variable as it is.
        is_one = not is_tuple or (is_secret(variable) and not text.startswith('["'))
        texts = [text] if is_one else split(text)
        value = tuple(map(parse, texts)) if is_tuple else parse(text)
    except ValueError as error:
        raise ValueError(f"{name} is not valid" if is_secret(variable) else f"{name}: {error}") from None
    _check(name, value, declared, hint)
    return value


def _parse_by_type(hint: Any) -> Callable[[str], Any]:
    if hint is bool:
        return read_switch
    return str if get_origin(hint) is Literal else hint


def _check(name: str, value: Any, declared: Option, hint: Any) -> None:
    """Raise `ValueError` if the value of a field, which errors call `name`, is not one of its choices, or outside its
    range."""
    choices = _choices(declared, hint)
    if choices is not None and value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number, got {value}")
    if declared.minimum is not None and value < declared.minimum:
        raise ValueError(f"{name} must be at least {declared.minimum:g}, got {value}")
    if declared.maximum is not None and value > declared.maximum:
        raise ValueError(f"{name} must be at most {declared.maximum:g}, got {value}")


def _groups(config: type) -> dict[str, type]:
    """The groups of a dataclass, by field name: the dataclasses in it whose fields are flags."""
    hints = get_type_hints(config)
    return {
        each.name: hints[each.name]
        for each, declared in options(config)
        if _is_nested(declared, hints[each.name]) and not declared.internal
    }


def _is_nested(declared: Option, hint: Any) -> bool:
    return is_dataclass(hint) and declared.parse is None


def _choices(declared: Option, hint: Any) -> Sequence[str] | None:
    return get_args(hint) if get_origin(hint) is Literal else declared.choices


def _without_none(hint: Any) -> Any:
    if type(None) not in get_args(hint):  # X | None is a Union, not a UnionType, if X is a Literal
        return hint
    (inner,) = (part for part in get_args(hint) if part is not type(None))
    return inner


def _with_message(parse: Callable[[str], Any]) -> Callable[[str], Any]:
    """argparse replaces a `ValueError`'s message by one of its own, but keeps that of an `ArgumentTypeError`."""

    def parse_argument(text: str) -> Any:
        try:
            return parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse_argument
