"""Ctrl-C ends every command with the exit status of a shell, and without a stack."""

from types import SimpleNamespace

import pytest

from proa_cli import commands
from proa_cli.main import COMMANDS, main


@pytest.mark.parametrize("name", [command.name for command in COMMANDS])
def test_ctrl_c_ends_a_command_with_status_130(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(parser: object, words: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(commands, "import_module", lambda module: SimpleNamespace(main=interrupted))
    assert main([name]) == 130
