"""The arguments of `proa serve`: the configurations of the engine and of the gateway.

Each program declares its own flags, as when it is run alone: here it is only decided which program a flag, or the
environment variable of one, belongs to. Both configurations are whole before any program starts.
"""

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from proa.addresses import host_and_port
from proa.environment import value_of, variable_of, warnings
from proa.options import HelpFormatter, Parser, add_options, flags, from_arguments
from proa_cli import vllm_flags
from proa_cli.given_flags import GivenFlag, read_file, read_words
from proa_engine.server.options import ServeOptions
from proa_gateway.config import GatewayConfig

T = TypeVar("T")
HOST = "127.0.0.1"  # on which the engine listens
# Of the flags of both programs, those that do not go to the gateway alone.
_TO_BOTH = {"--drain-timeout", "--log-level", "--log-format"}
_TO_ENGINE = {"--lora-modules", "--tokenizer"}

_LOOPBACK = "the two programs talk over the loopback interface, in plaintext; start them one by one for TLS"
NOT_HERE = {
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


@dataclass(frozen=True, slots=True)
class Arguments:
    engine: ServeOptions
    gateway: GatewayConfig
    notes: tuple[str, ...] = ()  # sentences for the user, about flags and variables without effect

    @property
    def model(self) -> str:
        """Its name in the API."""
        return self.engine.config.model_name

    @property
    def url(self) -> str:
        """Of the API on this machine."""
        host = {"0.0.0.0": HOST, "::": "::1"}.get(self.gateway.host, self.gateway.host)  # its "::" has no IPv4
        return f"http://{host_and_port(host, self.gateway.port)}"

    @property
    def needs_key(self) -> bool:
        """Whether requests need an API key."""
        return self.gateway.api_keys is not None or bool(self.api_key)

    @property
    def api_key(self) -> str:
        """A key that the gateway takes; empty if no flag or variable has one."""
        return next(iter((*self.gateway.api_key, *self.gateway.operator_key)), "")


def read_arguments(
    words: Sequence[str], environment: Mapping[str, str] | None = None, *, engine_port: int = 50051
) -> Arguments:
    """Read the words behind `proa serve`, and the variables of flags, for an engine that listens on `engine_port`.

    Raises `ValueError` with a sentence for the user, and exits with status 2 for what the parser of one of the programs
    refuses.
    """
    environment, (of_engine, of_gateway) = environment or {}, _flags_of_programs()
    _check_variables(environment)
    known = of_engine | of_gateway
    notes = list(warnings([variable_of(name) for name in ("--config", *known)], environment).values())
    model, given = _given(words, environment)
    engine = [f"--model={model}", f"--host={HOST}", f"--port={engine_port}"]
    gateway = [f"--engine={HOST}:{engine_port}"]
    for flag in given:
        if flag.name in NOT_HERE:
            raise ValueError(f"{flag.name} is not a flag of `proa serve`: {NOT_HERE[flag.name]}")
        if flag.name in of_engine:
            engine += flag.words
        if flag.name in of_gateway:
            gateway += flag.words
        if flag.name not in known:
            notes.append(_note(flag, known))
    for_engine = _variables(of_engine, environment)
    if model == "builtin" and "--no-enable-lora" not in engine and for_engine.keys().isdisjoint(_LORA_VARIABLES):
        engine += ["--enable-lora", *(f"--lora-modules={module}" for module in _BUILTIN_LORAS)]
    options = _parse(ServeOptions, engine, for_engine)
    if options.config.parallel.node_rank:
        raise ValueError("a gateway needs node 0: run the other nodes (--node-rank) with `proa-engine serve`")
    config = _parse(GatewayConfig, gateway, _variables(of_gateway, environment))
    if environment.get("VLLM_API_KEY") and not config.api_key:
        notes.append(f"VLLM_API_KEY is ignored: the variable of an API key is {variable_of('--api-key')}")
    return Arguments(options, config, tuple(notes))


def flags_here() -> set[str]:
    """The long names of all flags of `proa serve`."""
    return {"--config"} | frozenset.union(*_flags_of_programs()) - NOT_HERE.keys()


def _flags_of_programs() -> tuple[frozenset[str], frozenset[str]]:
    """The flags that go to the engine, and those that go to the gateway."""
    engine, gateway = frozenset(flags(ServeOptions)), frozenset(flags(GatewayConfig))
    return engine - (gateway - _TO_BOTH - _TO_ENGINE), gateway - _TO_ENGINE


def _check_variables(environment: Mapping[str, str]) -> None:
    """Raise `ValueError` if the variable of a flag is set that only the programs alone have."""
    for name in NOT_HERE.keys() - {"--model"}:
        if value_of(variable := variable_of(name), environment) is not None:
            raise ValueError(f"{variable} is set, but {name} is not a flag of `proa serve`: {NOT_HERE[name]}")


def _variables(names: Collection[str], environment: Mapping[str, str]) -> dict[str, str]:
    """The variables of these flags."""
    variables = {variable_of(name) for name in names if name not in NOT_HERE}
    return {name: text for name, text in environment.items() if name in variables}


def _given(words: Sequence[str], environment: Mapping[str, str]) -> tuple[str, list[GivenFlag]]:
    """The model, and the flags of the command line and of the files that `--config` names, or else its variable. Those
    of the command line override the files'. Raises `ValueError`."""
    named, words = (words[0], words[1:]) if words and not words[0].startswith("-") else (None, words)
    here = list(read_words(words))
    variable = value_of(variable_of("--config"), environment)
    paths = [flag.value for flag in here if flag.name == "--config"] or ([] if variable is None else [variable])
    of_files = [flag for path in paths for flag in read_file(Path(path))]
    models = [flag.value for flag in of_files if flag.name == "--model"]
    model = named or next(iter(models), None) or value_of(variable_of("--model"), environment)
    if model is None:
        raise ValueError("name a model behind `proa serve`: a folder, an id of the Hugging Face hub, or builtin")
    overridden = {flag.name for flag in here} | {"--model"}
    kept = [flag for flag in of_files if flag.name not in overridden]
    return model, [*kept, *(flag for flag in here if flag.name != "--config")]


def _parse(config: type[T], words: Sequence[str], environment: Mapping[str, str]) -> T:
    parser = Parser(prog="proa serve", add_help=False, allow_abbrev=False, formatter_class=HelpFormatter)
    add_options(parser, config)
    return from_arguments(config, parser.parse_args(words), environment)


def _note(given: GivenFlag, known: Collection[str]) -> str:
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
    return f"did you mean {close[0]}?" if close else "`proa serve --help=all` lists all"
