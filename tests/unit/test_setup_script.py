"""`scripts/setup` prints what it does in a few lines, whatever the package installer has to say."""

import os
import shutil
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]
# uv's listing of packages, which --quiet turns off.
UV = """#!/bin/sh
case " $* " in *" --quiet "*) ;; *) echo "Installed 159 packages in 2.06s"; echo " + torch==2.13.0" ;; esac
"""


def test_the_set_up_is_quiet(tmp_path: Path) -> None:
    for path in ("protos", "services/gateway", "engine", "services/cli"):
        (tmp_path / path).mkdir(parents=True)
        shutil.copy(ROOT / path / "pyproject.toml", tmp_path / path)
    shutil.copytree(ROOT / "requirements", tmp_path / "requirements")
    for path, text in (("scripts/setup", None), (".venv/bin/uv", UV), (".venv/bin/python", "#!/bin/sh\n")):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text or (ROOT / path).read_text())
        (tmp_path / path).chmod(0o755)
    for torch_index in ("", "https://example.com/cpu"):
        command, environment = [tmp_path / "scripts/setup"], {**os.environ, "TORCH_INDEX": torch_index}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, timeout=60)
        assert done.stderr == ""
        lines = done.stdout.splitlines()
        assert [line.partition(":")[0] for line in lines] == ["setup", "setup"], lines
        assert lines[-1] == "setup: done"
