"""How commands end: by Ctrl-C with the exit status of a shell and without a stack, and if they cannot run."""

from types import SimpleNamespace

import pytest

from proa_cli import commands
from proa_cli.commands import Command
from proa_cli.main import COMMANDS, main


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_ctrl_c_ends_a_command_with_status_130(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(parser: object, words: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "import_module", lambda module: SimpleNamespace(**{command.function: interrupted}))
    assert main([command.name]) == 130


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_without_a_command_the_commands_are_listed(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "measure" in capsys.readouterr().out


def test_a_program_that_is_missing_is_refused_before_a_model_is_loaded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "builtin", "--port=0", "--", "/no/such/program"]) == 1
    assert capsys.readouterr().err == "proa serve: error: cannot run /no/such/program: there is no such program\n"
