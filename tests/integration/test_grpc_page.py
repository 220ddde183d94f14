"""The example in docs/grpc.md works as it stands."""

import re
import subprocess
import sys
from pathlib import Path

from support.processes import fake_engine_process

PAGE = Path(__file__).parents[2] / "docs" / "grpc.md"


def test_client_in_ten_lines_prints_the_engines_text() -> None:
    code = re.search(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert code is not None
    with fake_engine_process("--text", "The fox said “naïve”. ") as (_, address):
        program = code[1].replace("127.0.0.1:50051", address)
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("The fox said “naïve”.")
    assert len([line for line in code[1].splitlines() if line and "import" not in line]) <= 10
