"""The arguments of `proa serve`, divided between the engine and the gateway.

Each program reads its own flags, as when it is run alone: here it is only decided which program a flag, or the
environment variable of one, belongs to. Both check theirs before any program starts.
"""

import argparse
import difflib
import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from proa.addresses import host_and_port
from proa.environment import HELP, value_of, variable_of, warnings
from proa.logs import Format
from proa.options import HelpFormatter, Parser, add_options, flags, from_arguments
from proa_cli import vllm_flags
from proa_engine.server.options import ServeOptions
from proa_gateway.config import GatewayConfig

# Where a flag of both programs goes.
_TO_BOTH = {"--drain-timeout", "--log-level", "--log-format"}
_TO_ENGINE = {"--lora-modules", "--tokenizer"}  # of the others the gateway's is meant
# Their values go to the gateway by its environment: all users of the machine can read the words of a program.
_KEYS = {"--api-key", "--operator-key"}

_LOOPBACK = "the two programs talk over the loopback interface, in plaintext; start them one by one for TLS"
_NOT_HERE = {
    "--model": "name the model behind `proa serve`",
    "--engine": "the engine is the one that this command starts",
    "--engine-service": "the engine is the one that this command starts",
    "--tls-cert": _LOOPBACK,
    "--tls-key": _LOOPBACK,
    "--tls-ca": _LOOPBACK,
    "--tls-server-name": _LOOPBACK,
}
_LORA_VARIABLES = (variable_of("--enable-lora"), variable_of("--lora-modules"))
_BUILTIN_LORAS = ("sailor=builtin:sailor", "butler=builtin:butler")
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Arguments:
    """`engine` and `gateway`: the words behind `serve` of each program, without the engine's address. The drain
    timeouts are in seconds. `notes`: sentences for the user, about flags without effect. `log_format`: of all."""

    engine: tuple[str, ...]
    gateway: tuple[str, ...]
    model: str  # its name in the API
    url: str  # of the API on this machine
    engine_drain_timeout: float
    gateway_drain_timeout: float
    notes: tuple[str, ...] = ()
    log_format: Format = "text"
    host: str = "0.0.0.0"  # on which the gateway listens
    needs_key: bool = False  # requests need an API key
    api_key: str = field(default="", repr=False)  # that the gateway takes, empty if no flag or variable has one
    key_variables: Mapping[str, str] = field(default_factory=dict, repr=False)  # of the gateway, in place of flags


@dataclass(frozen=True, slots=True)
class _Given:
    """A flag by its long name, and the words with which it was given."""

    name: str
    words: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Owners:
    """Which program the flags of `proa serve` go to."""

    of_engine: frozenset[str]
    of_gateway: frozenset[str]

    @classmethod
    def make(cls) -> Self:
        return cls(frozenset(flags(ServeOptions)), frozenset(flags(GatewayConfig)))

    @property
    def known(self) -> frozenset[str]:
        return self.of_engine | self.of_gateway

    def goes_to_engine(self, name: str) -> bool:
        is_of_both = name in self.of_engine & self.of_gateway
        return name in self.of_engine and (not is_of_both or name in _TO_BOTH | _TO_ENGINE)

    def goes_to_gateway(self, name: str) -> bool:
        is_of_both = name in self.of_engine & self.of_gateway
        return name in self.of_gateway and (not is_of_both or name not in _TO_ENGINE)


def read_arguments(words: Sequence[str], environment: Mapping[str, str] | None = None) -> Arguments:
    """Read the words behind `proa serve`, and the variables of flags. Raises `ValueError` with a sentence for the user,
    and exits with status 2 for what the parser of one of the programs refuses."""
    environment, owners = environment or {}, _Owners.make()
    named, words = _take_model(words)
    given_here = list(_flags(words))
    of_file = list(_of_file(given_here, environment))
    model = named or _model_of(of_file, environment)
    engine, gateway, keys = [f"--model={model}"], list[str](), list[_Given]()
    notes = list(_environment_warnings(environment, owners).values())
    for given in _overridden(of_file, given_here):
        if given.name in _NOT_HERE:
            raise ValueError(f"{given.name} is not a flag of `proa serve`: {_NOT_HERE[given.name]}")
        if given.name not in owners.known:
            notes.append(_note(given, owners.known))
        if given.name in _KEYS:
            keys.append(given)
            continue
        if owners.goes_to_engine(given.name):
            engine += given.words
        if owners.goes_to_gateway(given.name):
            gateway += given.words
    key_words, key_variables = _pass_keys(keys)
    gateway += key_words
    for_engine, for_gateway = program_environments(environment)
    if model == "builtin" and "--no-enable-lora" not in engine and for_engine.keys().isdisjoint(_LORA_VARIABLES):
        engine += ["--enable-lora", *(f"--lora-modules={module}" for module in _BUILTIN_LORAS)]
    options = from_arguments(ServeOptions, _parser_of(ServeOptions).parse_args(engine), for_engine)
    if options.config.node_rank:
        raise ValueError("a gateway needs node 0: run the other nodes (--node-rank) with `proa-engine serve`")
    parsed = _parser_of(GatewayConfig).parse_args([*gateway, f"--engine={_HOST}:1"])
    config = from_arguments(GatewayConfig, parsed, for_gateway | key_variables)
    if environment.get("VLLM_API_KEY") and not config.api_key:
        notes.append(f"VLLM_API_KEY is ignored: the variable of an API key is {variable_of('--api-key')}")
    host = {"0.0.0.0": _HOST, "::": "::1"}.get(config.host, config.host)  # the gateway's "::" has no IPv4
    return Arguments(
        tuple(engine),
        tuple(gateway),
        options.config.model_name,
        f"http://{host_and_port(host, config.port)}",
        options.drain_timeout,
        config.deadlines.shutdown,
        tuple(notes),
        options.logs.log_format,
        config.host,
        config.api_keys is not None or bool(config.api_key or config.operator_key),
        next(iter((*config.api_key, *config.operator_key)), ""),
        key_variables,
    )


def _pass_keys(keys: Sequence[_Given]) -> tuple[list[str], dict[str, str]]:
    """The words of keys that the gateway's parser refuses, and the variables of the others."""
    words, variables = list[str](), dict[str, str]()
    for name in _KEYS:
        given = [word for flag in keys if flag.name == name for word in flag.words]
        values = [word.removeprefix(f"{name}=") for word in given if word != name]
        if values and all(value.isascii() and value.isprintable() and value.strip() for value in values):
            variables[variable_of(name)] = json.dumps(values)
        else:
            words += given
    return words, variables


def program_environments(environment: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The environments of the engine and of the gateway: each without the variables of flags that go to the other one.
    Raises `ValueError` for the variable of a flag that only the programs alone have."""
    owners = _Owners.make()
    for name in _NOT_HERE.keys() - {"--model"}:
        if value_of(variable := variable_of(name), environment) is not None:
            raise ValueError(f"{variable} is set, but {name} is not a flag of `proa serve`: {_NOT_HERE[name]}")
    dropped = {variable_of("--model"), *_environment_warnings(environment, owners)}
    kept = {name: text for name, text in environment.items() if name not in dropped}
    flag_of = {variable_of(name): name for name in owners.known}
    return (
        {name: text for name, text in kept.items() if name not in flag_of or owners.goes_to_engine(flag_of[name])},
        {name: text for name, text in kept.items() if name not in flag_of or owners.goes_to_gateway(flag_of[name])},
    )


def flags_here() -> set[str]:
    """The long names of all flags of `proa serve`."""
    return {"--config"} | _Owners.make().known - _NOT_HERE.keys()


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add what `proa serve --help` shows: the model, the file, and the flags of both programs. `parser` must resolve
    conflicts: of a flag of both, the gateway's is shown."""
    parser.epilog = HELP
    parser.add_argument("model", help="a folder, an id of the Hugging Face hub, or builtin")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags, which those of the command line override")
    for config in (ServeOptions, GatewayConfig):
        add_options(parser, config)
    for action in parser._actions:
        if not _NOT_HERE.keys().isdisjoint(action.option_strings):
            action.help = argparse.SUPPRESS


def _environment_warnings(environment: Mapping[str, str], owners: _Owners) -> dict[str, str]:
    return warnings([variable_of(name) for name in ("--config", *owners.known)], environment)


def _take_model(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The model that the command line names, and the other words."""
    return (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)


def _model_of(of_file: Sequence[_Given], environment: Mapping[str, str]) -> str:
    """The model that the file of `--config` or a variable names. Raises `ValueError`."""
    for flag in of_file:
        if flag.name == "--model":
            return _value(flag)
    if (model := value_of(variable_of("--model"), environment)) is None:
        raise ValueError("name a model behind `proa serve`: a folder, an id of the Hugging Face hub, or builtin")
    return model


def _of_file(given: Sequence[_Given], environment: Mapping[str, str]) -> Iterator[_Given]:
    """Yield the flags of the files that `--config` names, or else its variable."""
    files = [_value(flag) for flag in given if flag.name == "--config"]
    path = value_of(variable_of("--config"), environment)
    for each in files or ([path] if path is not None else []):
        yield from _read_file(Path(each))


def _overridden(of_file: Sequence[_Given], given: Sequence[_Given]) -> Iterator[_Given]:
    """Yield the flags of the file that the command line does not have, then those of the command line."""
    overriding = {flag.name for flag in given} | {"--model"}
    yield from (flag for flag in of_file if flag.name not in overriding)
    yield from (flag for flag in given if flag.name != "--config")


def _flags(words: Sequence[str]) -> Iterator[_Given]:
    """Yield the flags, each with the words up to the next one."""
    current: list[str] = []
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            if current:
                yield _flag(current)
            current = [word]
        elif not current:
            raise ValueError(f"{word!r} is not a flag; only one model can be served")
        else:
            current.append(word)
    if current:
        yield _flag(current)


def _flag(words: Sequence[str]) -> _Given:
    """Names may have underscores in place of hyphens, as in vLLM."""
    name, value = vllm_flags.expand(words[0])
    return _Given(vllm_flags.positive(name), (name if value is None else f"{name}={value}", *words[1:]))


def _value(flag: _Given) -> str:
    value = flag.words[0].partition("=")[2] or (flag.words[1] if len(flag.words) > 1 else "")
    if not value:
        raise ValueError(f"{flag.name} needs a value")
    return value


def _read_file(path: Path) -> Iterator[_Given]:
    """Yield the flags of a YAML file: names without hyphens in front; true and false for flags without values, lists
    for those that can be repeated, mappings for those in JSON."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} is not YAML: {_in_one_line(error)}") from None
    if content is None:  # comments only
        return
    if not isinstance(content, Mapping):
        raise ValueError(f"--config {path} must be a mapping of flags to values")
    for name, value in content.items():
        flag = _flag(_words(str(name), value))
        if flag.name == "--config":
            raise ValueError(f"--config {path} names another file by {name}, which is not read")
        yield flag


def _in_one_line(error: Exception) -> str:
    """The reason and the place, without the lines of the file, which may have keys."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    match value:
        case True:
            return [flag]
        case False:
            positive = vllm_flags.positive(flag)
            return [positive if positive != flag else f"--no-{flag[2:]}"]
        case None:
            raise ValueError(f"{name} of the file of --config has no value")
        case list():
            return [flag, *map(_text, value)]
        case _:
            return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)


def _parser_of(config: type) -> Parser:
    parser = Parser(prog="proa serve", add_help=False, allow_abbrev=False, formatter_class=HelpFormatter)
    add_options(parser, config)
    return parser


def _note(given: _Given, known: Collection[str]) -> str:
    """Return why a flag that is not `known` has no effect. Raises `ValueError` unless it is such a flag of vLLM."""
    name, dot, _ = given.name.partition(".")
    if dot and name in known:
        raise ValueError(f"{given.name}: write {name} and its fields as JSON")
    row = vllm_flags.flag_table().get(name)
    if row is None:
        raise ValueError(f"unknown flag {given.words[0].partition('=')[0]}; {_hint(given.name, known)}")
    return vllm_flags.note(row, given.words)


def _hint(name: str, known: Collection[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else "`proa serve --help` lists all"
