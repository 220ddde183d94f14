"""Flags follow from the fields of a dataclass: type, default, help text and limits."""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from proa.options import (
    MASK,
    REQUIRED,
    HelpFormatter,
    Parser,
    add_options,
    check_options,
    environment_warnings,
    flags,
    flat,
    flat_hints,
    from_arguments,
    from_flat,
    masked,
    option,
    parse_count,
)


def parse_even(text: str) -> int:
    if int(text) % 2:
        raise ValueError(f"{text} is odd")
    return int(text)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    seconds: float = option(1.5, "time to wait", flag="--timeout", minimum=0)
    retries: int = option(3, "not a flag", internal=True)

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Files:
    key: Path | None = option(None, "key file", metavar="FILE")


@dataclass(frozen=True, slots=True, kw_only=True)
class Config:
    name: str = option(REQUIRED, "name of the thing")
    level: Literal["low", "high"] = option("low", "level, 100% by default")
    mode: Literal["fast", "slow"] | None = option(None, "mode (default: by size)")
    size: int | None = option(None, "size (default: chosen by the machine)", minimum=2, maximum=8)
    cache: bool = option(True, "use the cache")
    even: int = option(0, "even number", parse=parse_even)
    sockets: tuple[int, ...] = option((7,), "socket number; repeat for several", flag="--socket")
    one: str | None = option(None, "one source", exclusive="source")
    other: str | None = option(None, "other source", exclusive="source")
    limits: Limits = option(Limits(), "limits")
    files: Files | None = option(None, "files")

    def __post_init__(self) -> None:
        check_options(self)


def parse(
    *arguments: str,
    base: tuple[str, ...] = ("--name", "n", "--one", "x"),
    environment: Mapping[str, str] | None = None,
) -> Config:
    parser = Parser(prog="pytest", formatter_class=HelpFormatter)
    add_options(parser, Config)
    return from_arguments(Config, parser.parse_args([*base, *arguments]), environment)


def test_without_flags_the_fields_have_their_defaults() -> None:
    assert parse() == Config(name="n", one="x")


def test_flags_are_converted_to_the_fields_types() -> None:
    flags = "--level high --mode slow --size 4 --no-cache --even 6 --socket 1 --socket 2 --timeout 2 --key a"
    assert parse(*flags.split()) == Config(
        name="n",
        one="x",
        level="high",
        mode="slow",
        size=4,
        cache=False,
        even=6,
        sockets=(1, 2),
        limits=Limits(seconds=2.0),
        files=Files(key=Path("a")),
    )


@pytest.mark.parametrize("flags", ["--socket 1 2 --socket 3", "--socket 1 --socket 2 3", "--socket=1 --socket 2 3"])
def test_a_flag_of_a_tuple_takes_several_values_and_is_repeated(flags: str) -> None:
    assert parse(*flags.split()).sockets == (1, 2, 3)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--name n --one x --other y", "not allowed with"),
        ("--name n --one x --level lower", "invalid choice"),
        ("--name n --one x --mode slower", "invalid choice"),
        ("--name n --one x --even 3", "argument --even: 3 is odd"),
        ("--name n --one x --size many", "invalid int value"),
        ("--name n --one x --retries 4", "unrecognized arguments"),
        ("--name n --one x --level low --leevl=low", "unrecognized arguments: --leevl=low; did you mean --level?"),
        ("--name n --one x --no_cache", "unrecognized arguments: --no_cache; did you mean --no-cache?"),
        ("--name n --one x --zzz", "unrecognized arguments: --zzz; pytest --help lists all"),
    ],
)
def test_wrong_flags_end_with_a_message(arguments: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(*arguments.split(), base=())
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--one x", "the flag --name is required"),
        ("--name n", "one of the flags --one --other is required"),
    ],
)
def test_flags_that_are_required_are_named(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*arguments.split(), base=())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--size 1", "size must be at least 2, got 1"),
        ("--size 9", "size must be at most 8, got 9"),
        ("--timeout nan", "seconds must be a finite number"),
    ],
)
def test_values_out_of_range_are_rejected(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(*arguments.split())


def test_choices_are_checked_without_a_command_line() -> None:
    with pytest.raises(ValueError, match="level must be one of low, high, got other"):
        Config(name="n", level="other")  # type: ignore[arg-type]


def test_help_shows_defaults_but_not_none(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "level, 100% by default (default: low)" in text
    assert "size (default: chosen by the machine) --" in text


def test_a_field_that_is_not_an_option_is_an_error() -> None:
    @dataclass
    class Plain:
        value: int = 0

    with pytest.raises(TypeError, match=r"Plain\.value"):
        add_options(argparse.ArgumentParser(), Plain)


@pytest.mark.parametrize("name", ["key", "api_key", "apikeys", "hf-token", "API_TOKENS", "client_secret", "password"])
def test_texts_are_masked_by_the_name_of_their_field(name: str) -> None:
    assert masked({name: "s"}) == {name: MASK}
    assert masked({name: ("s", b"t")}) == {name: [MASK, MASK]}
    assert masked({"inner": [{name: {"value": "s"}}]}) == {"inner": [{name: {"value": MASK}}]}


def test_what_is_no_secret_is_shown() -> None:
    config = {
        "key": None,
        "tokens": 5,
        "next_token": 1.5,
        "return_token": True,
        "tokenizer": "folder",
        "keyboard": "de",
        "api_keys": Path("/etc/keys"),
        "api_key": "",
    }
    assert masked(config) == config


def test_flags_that_are_not_given_are_read_from_the_environment() -> None:
    environment = {
        "PROA_NAME": "n",
        "PROA_OTHER": "y",
        "PROA_LEVEL": "high",
        "PROA_MODE": "slow",
        "PROA_SIZE": "4",
        "PROA_CACHE": "False",
        "PROA_EVEN": "6",
        "PROA_SOCKET": "1, 2",
        "PROA_TIMEOUT": "2",
        "PROA_KEY": "a",
    }
    assert parse(base=(), environment=environment) == Config(
        name="n",
        other="y",
        level="high",
        mode="slow",
        size=4,
        cache=False,
        even=6,
        sockets=(1, 2),
        limits=Limits(seconds=2.0),
        files=Files(key=Path("a")),
    )


def test_the_command_line_comes_before_the_environment() -> None:
    environment = {"PROA_SIZE": "many", "PROA_CACHE": "0", "PROA_SOCKET": "1", "PROA_OTHER": "y", "PROA_NAME": "m"}
    config = parse("--size=4", "--cache", "--socket=2", environment=environment)
    assert config == Config(name="n", one="x", size=4, sockets=(2,))


def test_an_empty_variable_and_a_field_without_a_flag_are_not_read() -> None:
    assert parse(environment={"PROA_SIZE": "", "PROA_RETRIES": "9"}) == Config(name="n", one="x")


@pytest.mark.parametrize(
    ("variable", "text", "message"),
    [
        ("PROA_LEVEL", "lower", "the variable PROA_LEVEL must be one of low, high, got lower"),
        ("PROA_SIZE", "many", "the variable PROA_SIZE: .*'many'"),
        ("PROA_SIZE", "9", "the variable PROA_SIZE must be at most 8, got 9"),
        ("PROA_CACHE", "yes", "the variable PROA_CACHE: must be 1, 0, true or false, got 'yes'"),
        ("PROA_EVEN", "3", "the variable PROA_EVEN: 3 is odd"),
        ("PROA_SOCKET", "[1", r"the variable PROA_SOCKET: '\[1' is not a JSON array"),
        ("PROA_TIMEOUT", "nan", "the variable PROA_TIMEOUT must be a finite number"),
    ],
)
def test_errors_name_the_variable(variable: str, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(environment={variable: text})


def test_variables_of_flags_that_exclude_each_other_are_refused() -> None:
    with pytest.raises(ValueError, match="the variables PROA_ONE and PROA_OTHER exclude each other"):
        parse(base=("--name=n",), environment={"PROA_ONE": "x", "PROA_OTHER": "y"})


def test_errors_do_not_show_secrets() -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Keys:
        api_key: int = option(0, "key")

    parser = Parser(prog="pytest")
    add_options(parser, Keys)
    with pytest.raises(ValueError, match=r"^the variable PROA_API_KEY is not valid$"):
        from_arguments(Keys, parser.parse_args([]), {"PROA_API_KEY": "sk-1"})


def test_a_switch_with_a_value_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Switch:
        eager: bool = option(False, "switch")

    parser = Parser(prog="pytest")
    add_options(parser, Switch)
    with pytest.raises(SystemExit):
        parser.parse_args(["--eager=true"])
    assert capsys.readouterr().err == "pytest: error: argument --eager/--no-eager: takes no value, got 'true'\n"


@pytest.mark.parametrize(("text", "keys"), [("sk-1,[2", ("sk-1,[2",)), ('["sk-1,", "sk-2"]', ("sk-1,", "sk-2"))])
def test_the_variable_of_keys_has_one_key_or_an_array(text: str, keys: tuple[str, ...]) -> None:
    @dataclass(frozen=True, slots=True, kw_only=True)
    class Keys:
        api_key: tuple[str, ...] = option((), "key; repeat for several")

    parser = Parser(prog="pytest")
    add_options(parser, Keys)
    assert from_arguments(Keys, parser.parse_args([]), {"PROA_API_KEY": text}).api_key == keys


def test_misspelled_variables_are_named() -> None:
    (line,) = environment_warnings(Config, {"PROA_TIMEOUTS": "5", "PROA_TIMEOUT": "5"})
    assert line.startswith("PROA_TIMEOUTS is ignored: ")


def test_the_fields_of_a_group_stand_beside_the_others() -> None:
    config = Config(name="n", one="x", limits=Limits(seconds=2.0))
    values = flat(config)
    assert values == flat(Config(name="n", one="x")) | {"seconds": 2.0}
    assert values.keys() == flat_hints(Config).keys()
    assert "limits" not in values
    assert flat_hints(Config)["seconds"] is float
    assert from_flat(Config, values) == config
    assert from_flat(Config, {"name": "n"}) == Config(name="n")


@pytest.mark.parametrize(
    ("values", "error", "message"),
    [
        ({"second": 1.0}, TypeError, "'second'"),
        ({"seconds": -1.0}, ValueError, r"seconds must be at least 0, got -1\.0"),
        ({"size": 1}, ValueError, "size must be at least 2, got 1"),
    ],
)
def test_wrong_values_by_field_name_are_rejected(values: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        from_flat(Config, {"name": "n"} | values)


def test_flags_are_listed() -> None:
    assert list(flags(Config)) == [
        *("--name", "--level", "--mode", "--size", "--cache", "--even", "--socket", "--one", "--other"),
        *("--timeout", "--key"),
    ]


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("4096", 4096),
        ("32k", 32_000),
        ("32K", 32_768),
        (" 1M ", 1_048_576),
        ("25.6k", 25_600),
        ("1.1m", 1_100_000),
        ("2g", 2_000_000_000),
        ("1T", 1024**4),
        ("-1", -1),
    ],
)
def test_counts_have_vllms_units(text: str, number: int) -> None:
    assert parse_count(text) == number


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1.5K", r"'1.5K': K takes whole numbers; did you mean 1.5k\?"),
        ("1.5", "'1.5' is not a number such as 4096, 32k"),
        ("32kB", "is not a number"),
        ("", "is not a number"),
    ],
)
def test_wrong_counts_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_count(text)
