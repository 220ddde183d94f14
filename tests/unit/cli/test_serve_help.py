"""`proa serve --help` begins with the flags that people use first; `--help=all` has each flag once."""

import re

import pytest

from proa_cli.arguments import flags_here
from proa_cli.main import main
from proa_cli.serve_help import FIRST

FLAG = re.compile(r"^  (?:-\w(?: \w+)?, )?(--(?!no-)[\w-]+)", re.MULTILINE)
TITLE = re.compile(r"^([\w ]+):$", re.MULTILINE)


@pytest.fixture(autouse=True)
def a_terminal_of_100_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


def help_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as exited:
        main(["serve", *words])
    assert exited.value.code == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", [["--help"], ["-h"], ["builtin", "--port=1", "--help"]])
def test_the_first_flags_come_in_groups_and_nothing_else(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(capsys, *words)
    assert TITLE.findall(printed)[1:] == list(FIRST)
    assert FLAG.findall(printed) == [name for names in FIRST.values() for name in names]
    assert printed.splitlines()[-1].startswith("--help=all shows all ")
    assert len(printed.splitlines()) <= 90  # all flags: about 400


def test_the_rest_follows_in_the_groups_of_the_programs(capsys: pytest.CaptureFixture[str]) -> None:
    printed = help_of(capsys, "--help=all")
    first = [name for names in FIRST.values() for name in names]
    names = FLAG.findall(printed)
    assert names[: len(first)] == first
    assert len(names) == len(set(names))
    assert set(names) == flags_here()
    assert f"shows all {len(names)} flags" in help_of(capsys, "--help")
    titles = TITLE.findall(printed)
    assert titles[1 : len(FIRST) + 1] == list(FIRST)
    assert {"engine", "gateway", "LoRA adapters", "time limits in seconds"} <= set(titles)
    assert len(titles) == len(set(titles))
    assert "PROA_MAX_MODEL_LEN is" in printed


def test_an_unknown_flag_is_pointed_to_the_list_of_all(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "builtin", "--zzz"]) == 1
    assert "unknown flag --zzz; `proa serve --help=all` lists all" in capsys.readouterr().err
