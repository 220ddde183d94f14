"""The Jinja environment of chat templates: a sandbox in which nothing takes unbounded time or memory.

A template comes with a model or with a request, and neither a thread nor a function written in C can be interrupted. So
whatever makes a value larger than those that it is made of is charged to a `Budget`: before it runs where sizes are
multiplied (`*`, `%`, paddings, `join`, `replace`), else right after it. All other operations take time in proportion to
values that were charged, and `template_guards.py` puts looks at the clock between them.

A process that can be ended would need none of these rules, but handing it a conversation takes longer than rendering
one.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import update_wrapper, wraps
from types import BuiltinMethodType, MethodType
from typing import Any, Final

from jinja2 import Environment, pass_environment
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import make_attrgetter
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Namespace

from proa.template_budget import TemplateTooCostly, concat, current, grown
from proa.template_guards import GUARDS, MAX_INT_BITS, steps

MAX_WIDTH: Final = 10_000
"""Of a padded text and of a number that is written."""
MAX_SLOW_SIZE: Final = 10_000
"""Of a value that is given to a slow filter, which uses regular expressions or prints prettily."""
_MAX_INDENT = 100  # of JSON
_LONG_NUMBER = re.compile(r"\d{5,}")
_VARIABLE_WIDTH = re.compile(r"%.*\*", re.DOTALL)
Args = tuple[Any, ...]
Check = Callable[[Any, Args, Mapping[str, Any]], Args]
"""Checks a call before it runs, given the value that it belongs to. Returns the arguments, where an iterator has become
a list, so that its size is known. Raises `TemplateTooCostly`."""

_DICT_NAMES: Final = frozenset(dir(dict))
_STR_NAMES: Final = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
_LOOP_NAMES: Final = frozenset(name for name in dir(LoopContext) if not name.startswith("_"))
_CHEAP: Final = frozenset(("abs", "attr", "count", "d", "default", "first", "float", "last", "length", "random"))
"""Filters that return a number or what they are given."""
_COMPARISONS: Final = ("==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan")
_LONG_TESTS: Final = (*_COMPARISONS, "<=", "le", "in", "lower", "upper")
"""Tests that take time by the size of a value. `|select` runs a test for each item."""


def _multiply(value: object, times: int) -> None:
    """Charge a value so many times."""
    budget = current.get()
    if times > 0:
        budget.spend(times * (len(value) if isinstance(value, str | bytes) else budget.size_of(value)))


def _check_widths(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    if any(isinstance(each, int) and abs(each) > MAX_WIDTH for each in (*args, *kwargs.values())):
        raise TemplateTooCostly(f"it uses a width or a count above {MAX_WIDTH}")
    return args


def _check_indent(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    lines = str(value).count("\n") + 1
    for each in (*args, *kwargs.values()):
        current.get().spend(lines * (each if isinstance(each, int) and each > 0 else current.get().size_of(each)))
    return _check_widths(value, args, kwargs)


def _check_json(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    """Separators and indentations come with each part of the value."""
    for each in (*args, *kwargs.values()):
        size = each if isinstance(each, int) else 0 if each is None else len(str(each))
        if size > _MAX_INDENT:
            raise TemplateTooCostly(f"it writes JSON with an indentation or a separator of more than {_MAX_INDENT}")
    return args


def _check_join(separator: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    items = args[0] if args and isinstance(args[0], str | list | tuple | dict) else [*_charged(iter(*args[:1]))]
    _multiply(separator, len(items))
    _multiply(items, 1)
    return (items, *args[1:])


def _check_replace(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    names = ("old", "new")
    old, new = (args[place] if place < len(args) else kwargs[name] for place, name in enumerate(names))
    if not isinstance(value, bytes):
        value, old, new = str(value), str(old), str(new)
    if len(new) > len(old):
        _multiply(new, value.count(old))
    return args


def _check_format(pattern: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    """Of `%` and of `|format`."""
    text = pattern.decode("latin-1") if isinstance(pattern, bytes) else str(pattern)
    if "%" in text and (_LONG_NUMBER.search(text) or _VARIABLE_WIDTH.search(text)):
        raise TemplateTooCostly("it formats with a number of more than four digits, or with a variable width")
    _multiply([*args, *kwargs.values()], text.count("%"))
    return args


def _check_tabs(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    current.get().spend(8 * len(value))
    return _check_widths(value, args, kwargs) if len(value) < MAX_WIDTH else _refuse(value, args, kwargs)


def _check_translate(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    if args and isinstance(args[0], Mapping):
        current.get().spend(
            len(value) * max((len(each) for each in args[0].values() if isinstance(each, str)), default=0)
        )
    return args


def _check_number(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    """Python limits the digits of decimal numbers only."""
    return _refuse(value, args, kwargs) if isinstance(value, str | bytes) and len(value) > MAX_INT_BITS else args


def _check_slow(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    small = current.get().size_of(value) <= MAX_SLOW_SIZE
    return _check_widths(value, args, kwargs) if small else _refuse(value, args, kwargs)


def _check_sum(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    """Adding up lists takes time by the square of their number."""
    start = kwargs.get("start", args[1] if len(args) > 1 else 0)
    return args if isinstance(start, int | float) else _refuse(value, args, kwargs)


def _check_default(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    """The default is compared, perhaps copied, for each item."""
    return args if current.get().size_of([*args, *kwargs.values()]) < MAX_INT_BITS else _refuse(value, args, kwargs)


def _refuse(value: Any, args: Args, kwargs: Mapping[str, Any]) -> Args:
    raise TemplateTooCostly("it gives a long value to a function that is slow or makes a longer one")


_METHODS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _check_widths),
    "join": _check_join,
    "replace": _check_replace,
    "expandtabs": _check_tabs,
    "translate": _check_translate,
    **dict.fromkeys(("to_bytes", "from_bytes"), _refuse),
}
"""Methods of built-in types that make values larger than those that they are given. `str.format` is apart."""
_FILTERS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("batch", "center", "round", "slice"), _check_widths),
    **dict.fromkeys(
        ("pprint", "striptags", "title", "urlencode", "urlize", "wordcount", "wordwrap", "xmlattr"), _check_slow
    ),
    "format": _check_format,
    "groupby": _check_default,
    "indent": _check_indent,
    "int": _check_number,
    "replace": _check_replace,
    "sum": _check_sum,
    "tojson": _check_json,
}


class TemplateNamespace(Namespace):
    """Jinja's `namespace()`. It is not written out: a template may set its fields to lists that hold it many times."""

    def __repr__(self) -> str:
        return "<Namespace>"


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """`filters`: in addition to Jinja's, or in place of them."""

    intercepted_binops = frozenset(("*", "**", "%"))
    concat = staticmethod(concat)

    def __init__(self, extensions: Sequence[type[Extension]], filters: Mapping[str, Callable[..., Any]]) -> None:
        # The optimizer takes time by the cube of a chain's length: 6 s for 150 filters. It is of no use for templates.
        super().__init__(trim_blocks=True, lstrip_blocks=True, optimized=False, extensions=[*extensions, loopcontrols])
        self.globals["namespace"] = TemplateNamespace
        del self.globals["lipsum"]  # makes random text, and looks at no clock
        self.filters |= filters
        self.filters |= {name: _bounded(name, each) for name, each in self.filters.items() if name not in _CHEAP}
        self.filters |= {"join": _join, "trim": _trim, **GUARDS}
        self.tests |= {name: _timed(self.tests[name]) for name in _LONG_TESTS}

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "%" and isinstance(left, str | bytes):
            _check_format(left, right if isinstance(right, tuple) else (right,), {})
        elif operator == "**" and isinstance(left, int) and isinstance(right, int):
            _check_digits(left.bit_length() * right)
        elif operator == "*" and isinstance(left, int) and isinstance(right, int):
            _check_digits(left.bit_length() + right.bit_length())
        elif operator == "*" and isinstance(right, int):
            _multiply(left, right)
        elif operator == "*" and isinstance(left, int):
            _multiply(right, left)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        if super().wrap_str_format(value) is None:
            return None
        pattern, takes_mapping = str(value.__self__), value.__name__ == "format_map"

        def formatted(*args: Any, **kwargs: Any) -> str:
            values: tuple[Args, Any] = ((), args[0]) if takes_mapping else (args, kwargs)
            return _Formatter(self).vformat(pattern, *values)

        return update_wrapper(formatted, value)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As in Jinja, which takes 2 µs for what templates read most: it raises and catches an exception for each item
        of a dict, and asks for each method of a text whether it changes the text."""
        kind = type(obj)
        if kind is dict and attribute not in _DICT_NAMES:
            try:
                return obj[attribute]
            except KeyError:
                return self.undefined(obj=obj, name=attribute)
        if (kind is str and attribute in _STR_NAMES) or (kind is LoopContext and attribute in _LOOP_NAMES):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        kind = type(__obj)
        if kind is BuiltinMethodType or kind is MethodType:
            check = _METHODS.get(__obj.__name__)
            if check is not None:
                args = check(__obj.__self__, args, kwargs)
        elif kind is LoopContext:  # a recursive loop goes on with other items
            args = tuple(map(steps, args))
        return grown(super().call(__context, __obj, *args, **kwargs))


class _Formatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> Any:
        if _LONG_NUMBER.search(format_spec):
            raise TemplateTooCostly("it formats with a number of more than four digits")
        _multiply(value, 1)
        return super().format_field(value, format_spec)


def _check_digits(bits: int) -> None:
    if bits > MAX_INT_BITS:
        raise TemplateTooCostly("it computes a number with too many digits")


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter that checks its arguments, by its name, and charges its result."""
    check = _FILTERS.get(name)
    place = 1 if hasattr(function, "jinja_pass_arg") else 0  # of the value among the arguments

    @wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        if check is not None:
            check(args[place], args[place + 1 :], kwargs)
        result = function(*args, **kwargs)
        return _charged(result) if hasattr(result, "__next__") else grown(result)

    return run


def _charged(items: Iterator[Any]) -> Iterator[Any]:
    """Charge each item that a filter yields: they may be the same large value."""
    budget = current.get()
    for item in items:
        budget.spend(budget.size_of(item))
        yield item


@pass_environment
def _join(environment: Environment, value: Iterable[Any], d: Any = "", attribute: str | int | None = None) -> str:
    """Jinja's filter, which does not know how much it joins."""
    items = value if attribute is None else map(make_attrgetter(environment, attribute), value)
    texts = [str(item) for item in _charged(iter(items))]
    _multiply(d, len(texts))
    return str(d).join(texts)


def _trim(value: Any, chars: str | None = None) -> str:
    """Jinja's filter, as one function: most templates trim each message."""
    text: str = grown((value if isinstance(value, str) else str(value)).strip(chars))
    return text


def _timed(test: Any) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        current.get().spend(0)
        return test(*args)

    return run
