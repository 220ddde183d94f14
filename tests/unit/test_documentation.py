"""The documentation's commands and snippets name what exists. `tests/system/test_documentation.py` runs them."""

import json
import re
import tomllib
from collections.abc import Callable
from contextlib import redirect_stdout
from io import StringIO

import pytest
import yaml

from proa_cli.arguments import flags_here
from proa_cli.main import main as run_proa
from proa_cli.vllm_flags import flag_table
from proa_engine.cli import make_parser as make_engine_parser
from proa_gateway.cli import make_parser as make_gateway_parser
from support import chart
from support.documentation import PROGRAMS, ROOT, Command, Snippet, commands, snippets

MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.findall(r"^([a-z0-9-]+):", MAKEFILE, re.MULTILINE))
RUN: dict[str, Callable[[list[str]], object]] = {
    "proa": run_proa,
    "proa-engine": lambda words: make_engine_parser().parse_args(words),
    "proa-gateway": lambda words: make_gateway_parser().parse_args(words),
}
OF_INSTALLING = {"--wait", "--reuse-values"}  # flags of helm that `helm template` does not have


def check_make(command: Command) -> None:
    variables = [word.partition("=")[0] for word in command.words[1:] if "=" in word]
    targets = {word for word in command.words[1:] if "=" not in word}
    assert targets <= TARGETS
    assert all(re.search(rf"\b{name}\b", MAKEFILE) for name in variables)


def check_script(command: Command) -> None:
    match command.words[1:]:
        case ("-m", "pip", *_):
            check_pip(command)
        case ("-m", module, *_):
            assert (ROOT / module.replace(".", "/")).with_suffix(".py").is_file()
        case (path, *_):
            assert (ROOT / path).is_file()


def check_program(command: Command) -> None:
    printed = help_of(command.program, *command.words[1:2])
    assert set(command.flags) <= set(re.findall(r"--[\w-]+", printed))


def check_proa(command: Command) -> None:
    """`serve` and `run-batch` know vLLM's flags too, and the help of `serve` has those of both."""
    printed = help_of("proa", *command.words[1 : 3 if command.words[1] == "bench" else 2])
    known = set(re.findall(r"--[\w-]+", printed))
    if command.words[1] in ("serve", "run-batch"):
        known |= flags_here() | flag_table().keys()
    own = command.words[: command.words.index("--")] if "--" in command.words else command.words
    assert own[1] != "serve" or "--model" not in own  # the model stands behind `serve`
    assert {word.partition("=")[0] for word in own if word.startswith("--")} <= known


def help_of(program: str, *subcommand: str) -> str:
    with redirect_stdout(StringIO()) as printed, pytest.raises(SystemExit):
        RUN[program]([*subcommand, "--help"])
    return printed.getvalue()


def check_helm(command: Command) -> None:
    for flag, value in zip(command.words, command.words[1:], strict=False):
        assert flag != "--values" or (ROOT / value).is_file()
    if "charts/proa" in command.words:
        first = command.words.index("charts/proa") + 1
        chart.render(None, *(word for word in command.words[first:] if word not in OF_INSTALLING))


def check_kubectl(command: Command) -> None:
    match command.words[1:]:
        case ("apply", "-f", path):
            assert list(yaml.safe_load_all((ROOT / path).read_text()))
        case ("port-forward", service, ports):
            listening = chart.lookup(chart.render(), "Service", service.removeprefix("service/"), "spec", "ports")
            assert int(ports.split(":")[1]) in [port["port"] for port in listening]


def check_pip(command: Command) -> None:
    for flag, value in zip(command.words, command.words[1:], strict=False):
        is_path = flag in ("-e", "-r") or (flag == "install" and "/" in value)
        assert not is_path or (ROOT / value).exists()
    for package, extra in re.findall(r"proa-(\w+)\[(\w+)\]", command.text):
        folder = next(each for each in (ROOT / package, ROOT / "services" / package) if each.is_dir())
        project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
        assert extra in project["optional-dependencies"]


def check_pytest(command: Command) -> None:
    for flag, word in zip(command.words, command.words[1:], strict=False):
        assert word.startswith("-") or flag == "-k" or (ROOT / word).exists()


def check_curl(command: Command) -> None:
    """Only a gateway can tell."""


RULES: dict[str, Callable[[Command], None]] = {
    "curl": check_curl,
    "helm": check_helm,
    "kubectl": check_kubectl,
    "make": check_make,
    "pip": check_pip,
    "proa": check_proa,
    "proa-engine": check_program,
    "proa-gateway": check_program,
    "pytest": check_pytest,
    "python": check_script,
    "python3": check_script,
}


def test_each_program_has_a_rule() -> None:
    assert set(RULES) == set(PROGRAMS)
    assert len(commands()) > 100, "the commands are not found"
    assert {command.program for command in commands()} == set(PROGRAMS), "a rule has no command"


@pytest.mark.parametrize("command", [each for each in commands() if each.program not in ("helm", "kubectl")], ids=str)
def test_each_command_names_what_exists(command: Command) -> None:
    RULES[command.program](command)


@chart.needs_helm
@pytest.mark.parametrize("command", [each for each in commands() if each.program in ("helm", "kubectl")], ids=str)
def test_each_command_of_a_cluster_fits_the_chart(command: Command) -> None:
    RULES[command.program](command)


@chart.needs_helm
@pytest.mark.parametrize(
    "snippet", [each for each in snippets() if each.language == "yaml"], ids=lambda each: each.page
)
def test_values_are_those_of_the_chart(snippet: Snippet) -> None:
    chart.render(yaml.safe_load(snippet.text))


def test_json_and_python_can_be_parsed() -> None:
    for snippet in snippets():
        if snippet.language == "json":
            json.loads(snippet.text)
        elif snippet.language == "python":
            compile(snippet.text, f"{snippet.page}:{snippet.line}", "exec")


def test_help_texts_name_flags_that_exist() -> None:
    texts = [help_of("proa-engine", "serve"), *(help_of("proa-gateway", name) for name in ("serve", "run-batch"))]
    text = "\n".join(texts)
    defined = set(re.findall(r"^ +(?:-\w+ \w+, |-\w, )?(--[\w-]+)", text, re.MULTILINE))
    defined |= set(re.findall(r"(--no-[\w-]+)", text))
    assert set(re.findall(r"--[a-z][\w-]+", text)) - defined == set()


def test_the_client_of_the_grpc_page_has_ten_lines() -> None:
    client, _ = (each for each in snippets() if (each.page, each.language) == ("docs/grpc.md", "python"))
    assert len([line for line in client.text.splitlines() if line and "import" not in line]) <= 10
