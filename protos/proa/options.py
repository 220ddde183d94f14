"""Command-line flags from the fields of configuration dataclasses.

A field declares its default, help text and limits once:

    @dataclass(frozen=True, kw_only=True)
    class Config:
        port: int = option(8000, "port to listen on", minimum=0, maximum=65535)
        models: tuple[str, ...] = option((), "model name; repeat for several", flag="--model")

        def __post_init__(self) -> None:
            check_options(self)

`add_options` adds one flag for each field to a parser, and `from_arguments` builds the dataclass from the result.
The field's type gives the flag's: `bool` becomes `--name` and `--no-name`, `Literal` the choices, `tuple` a flag that
can be repeated and takes several values, a dataclass an argument group of its own fields. `X | None` is parsed as `X`.
`Parser` is argparse's, with a suggestion for a flag that it does not know.
"""

import argparse
import difflib
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

T = TypeVar("T")
MASK = "***"
_SECRET = re.compile(r"(?:.*[_-])?(?:api)?(?:key|token|secret|password)s?", re.IGNORECASE)
REQUIRED: Any = MISSING
"""The default of an option that must be given."""


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
        if value is None:
            continue
        choices = _choices(declared, _without_none(hints[each.name]))
        if choices is not None and value not in choices:
            raise ValueError(f"{each.name} must be one of {', '.join(choices)}, got {value}")
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"{each.name} must be a finite number, got {value}")
        if declared.minimum is not None and value < declared.minimum:
            raise ValueError(f"{each.name} must be at least {declared.minimum:g}, got {value}")
        if declared.maximum is not None and value > declared.maximum:
            raise ValueError(f"{each.name} must be at most {declared.maximum:g}, got {value}")


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


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows defaults, except None and (): the help text explains those."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        return action.help if action.default in (None, ()) else super()._get_help_string(action)


def add_options(parser: argparse.ArgumentParser, config: type) -> None:
    """Add the flags of a dataclass and of the dataclasses in it. The parser should use `HelpFormatter`."""
    _add(parser, parser, config, "")


def from_arguments(config: type[T], arguments: argparse.Namespace) -> T:
    """Build the dataclass from parsed arguments. Raises `ValueError` where it does.

    A field of type `D | None`, `D` a dataclass, is None if none of its flags was given.
    """
    return _build(config, arguments, "")


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
            target = exclusive.get(declared.exclusive) or group.add_mutually_exclusive_group(required=True)
            exclusive[declared.exclusive] = target
        flag = declared.flag or "--" + each.name.replace("_", "-")
        names = [flag] if declared.short is None else [declared.short, flag]
        target.add_argument(*names, dest=path, **_argument_settings(flag, each, declared, hint))


def _argument_settings(flag: str, each: Field[Any], declared: Option, hint: Any) -> dict[str, Any]:
    result: dict[str, Any] = {"help": declared.help.replace("%", "%%"), "default": each.default}
    if each.default is MISSING:
        result |= {"default": None, "required": True}
    if hint is bool and declared.parse is None:
        return result | {"action": argparse.BooleanOptionalAction}
    if get_origin(hint) is tuple:
        result |= {"action": "extend", "nargs": "+", "default": None}
        hint = get_args(hint)[0]
    if (choices := _choices(declared, hint)) is not None:
        return result | {"choices": choices}
    metavar = declared.metavar or flag.lstrip("-").upper().replace("-", "_")
    return result | {"metavar": metavar, "type": hint if declared.parse is None else _with_message(declared.parse)}


def _build(config: type[T], arguments: argparse.Namespace, prefix: str) -> T:
    hints = get_type_hints(config)
    values: dict[str, Any] = {}
    for each, declared in options(config):
        hint, path = _without_none(hints[each.name]), prefix + each.name
        if declared.internal:
            continue
        if _is_nested(declared, hint):
            value = _build(hint, arguments, path + ".")
            values[each.name] = None if each.default is None and value == hint() else value
            continue
        value = getattr(arguments, path)
        if get_origin(hint) is not tuple:
            values[each.name] = value
        elif value is not None:  # given at least once
            values[each.name] = tuple(value)
    return config(**values)


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
