"""The arguments of `proa serve`, divided between the engine and the gateway.

Each program reads its own flags, as when it is run alone: here it is only decided which program a flag belongs to. Both
check theirs before any program starts.
"""

import argparse
import difflib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proa.options import HelpFormatter, Parser, add_options, from_arguments
from proa_cli import vllm_flags
from proa_cli.vllm_table import TABLE
from proa_engine.server.options import ServeOptions
from proa_gateway.config import GatewayConfig

# Where a flag of both programs goes.
_TO_BOTH = {"--drain-timeout"}
_TO_ENGINE = {"--lora-modules", "--tokenizer"}  # of the others the gateway's is meant

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
_BUILTIN_LORAS = ("sailor=builtin:sailor", "butler=builtin:butler")
_HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Arguments:
    """`engine` and `gateway`: the words behind `serve` of each program, without the engine's address. The drain
    timeouts are in seconds. `notes`: sentences for the user, about flags without effect."""

    engine: tuple[str, ...]
    gateway: tuple[str, ...]
    url: str  # of the API on this machine
    engine_drain_timeout: float
    gateway_drain_timeout: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Given:
    """A flag by its long name, and the words with which it was given."""

    name: str
    words: tuple[str, ...]


def read_arguments(words: Sequence[str]) -> Arguments:
    """Read the words behind `proa serve`. Raises `ValueError` with a sentence for the user, and exits with status 2 for
    what the parser of one of the programs refuses."""
    model, words = _take_model(words)
    engine_parser, gateway_parser = _parser_of(ServeOptions), _parser_of(GatewayConfig)
    of_engine, of_gateway = _names(engine_parser), _names(gateway_parser)
    engine, gateway, notes = [f"--model={model}"], list[str](), list[str]()
    for given in _with_config_file(words):
        if given.name in _NOT_HERE:
            raise ValueError(f"{given.name} is not a flag of `proa serve`: {_NOT_HERE[given.name]}")
        if given.name not in of_engine | of_gateway:
            notes.append(_note(given, of_engine | of_gateway))
        is_of_both = given.name in of_engine & of_gateway
        if given.name in of_engine and (not is_of_both or given.name in _TO_BOTH | _TO_ENGINE):
            engine += given.words
        if given.name in of_gateway and (not is_of_both or given.name not in _TO_ENGINE):
            gateway += given.words
    if model == "builtin" and "--no-enable-lora" not in engine:
        engine += ["--enable-lora", *(f"--lora-modules={module}" for module in _BUILTIN_LORAS)]
    options = from_arguments(ServeOptions, engine_parser.parse_args(engine))
    if options.config.node_rank:
        raise ValueError("a gateway needs node 0: run the other nodes (--node-rank) with `proa-engine serve`")
    config = from_arguments(GatewayConfig, gateway_parser.parse_args([*gateway, f"--engine={_HOST}:1"]))
    host = _HOST if config.host in ("0.0.0.0", "::") else f"[{config.host}]" if ":" in config.host else config.host
    return Arguments(
        tuple(engine),
        tuple(gateway),
        f"http://{host}:{config.port}",
        options.drain_timeout,
        config.deadlines.shutdown,
        tuple(notes),
    )


def flags_here() -> set[str]:
    """The long names of all flags of `proa serve`."""
    return {"--config"} | (_names(_parser_of(ServeOptions)) | _names(_parser_of(GatewayConfig))) - _NOT_HERE.keys()


def add_help(parser: argparse.ArgumentParser) -> None:
    """Add what `proa serve --help` shows: the model, the file, and the flags of both programs. `parser` must resolve
    conflicts: of a flag of both, the gateway's is shown."""
    parser.add_argument("model", help="a folder, an id of the Hugging Face hub, or builtin")
    parser.add_argument("--config", metavar="FILE", help="YAML file of flags, which those of the command line override")
    for config in (ServeOptions, GatewayConfig):
        add_options(parser, config)
    for action in parser._actions:
        if not _NOT_HERE.keys().isdisjoint(action.option_strings):
            action.help = argparse.SUPPRESS


def _take_model(words: Sequence[str]) -> tuple[str, Sequence[str]]:
    if not words or words[0].startswith("-"):
        raise ValueError("name a model behind `proa serve`: a folder, an id of the Hugging Face hub, or builtin")
    return words[0], words[1:]


def _with_config_file(words: Sequence[str]) -> Iterator[_Given]:
    """Yield the flags of the file that `--config` names, then those of the command line."""
    given = list(_flags(words))
    overriding = {flag.name for flag in given}
    for flag in given:
        if flag.name == "--config":
            yield from (each for each in _read_file(Path(_value(flag))) if each.name not in overriding)
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
        raise ValueError(f"--config {path} is not YAML: {error}") from None
    if not isinstance(content, Mapping):
        raise ValueError(f"--config {path} must be a mapping of flags to values")
    for name, value in content.items():
        yield _flag(_words(str(name), value))


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


def _names(parser: argparse.ArgumentParser) -> set[str]:
    return {name for action in parser._actions for name in action.option_strings if name.startswith("--")}


def _note(given: _Given, known: set[str]) -> str:
    """Return why a flag that is not `known` has no effect. Raises `ValueError` unless it is such a flag of vLLM."""
    name, dot, _ = given.name.partition(".")
    if dot and name in known:
        raise ValueError(f"{given.name}: write {name} and its fields as JSON")
    if name not in TABLE:
        raise ValueError(f"unknown flag {given.name}; {_hint(given.name, known)}")
    return vllm_flags.note(TABLE[name], given.words)


def _hint(name: str, known: set[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"did you mean {close[0]}?" if close else "`proa serve --help` lists all"
