"""Check Proa with the clients that people use: `python tests/peers/clients.py --url http://127.0.0.1:8000`.

Installs the newest versions of all clients into an environment of their own (`build/clients`), and there calls every
check of `client_checks/` against a gateway that serves the built-in model. Prints a line for each, and exits with 1 if
one fails. The gateway needs --enable-tokenizer-info-endpoint for lm-eval.
"""

import argparse
import importlib
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

CLIENTS = (
    *("openai", "anthropic", "langchain-openai", "langchain-anthropic", "litellm", "instructor", "openai-agents"),
    *("cohere", "lm-eval[api]"),
)
MODULES = (
    *("openai_chat", "openai_responses", "anthropic_messages", "langchain_chat", "frameworks", "evaluation"),
    "embeddings",
)
FOLDER = Path("build/clients")


def main() -> int:
    arguments = parse_arguments()
    if not arguments.here:
        return subprocess.run([install(), __file__, *sys.argv[1:], "--here"]).returncode
    for name in ("OPENAI_API_KEY", "ANTHROPIC_API_KEY"):
        os.environ.setdefault(name, "none")
    os.environ["OPENAI_AGENTS_DISABLE_TRACING"] = os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "1"
    failed = [name for name, check in find_checks(arguments.only) if not run(name, check, arguments)]
    print(f"{len(failed)} failed: {', '.join(failed)}" if failed else "all passed")
    return 1 if failed else 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check a running gateway with the clients that people use.")
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="address of the gateway")
    parser.add_argument("--model", default="proa-builtin")
    parser.add_argument("--only", default="", help="run only checks whose name contains this text")
    parser.add_argument("--here", action="store_true", help="use the packages of this Python, install nothing")
    return parser.parse_args()


def install() -> str:
    """The Python of the environment that has all clients."""
    python = FOLDER / "bin/python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", FOLDER], check=True)
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *CLIENTS], check=True)
    return str(python)


def find_checks(only: str) -> list[tuple[str, Callable[[str, str], Any]]]:
    """All functions whose names begin with `check_`, by module and name."""
    sys.path.insert(0, str(Path(__file__).parent))
    found = []
    for module in MODULES:
        functions = vars(importlib.import_module(f"client_checks.{module}"))
        found += [(f"{module}.{name[6:]}", value) for name, value in functions.items() if name.startswith("check_")]
    return [(name, check) for name, check in found if only in name]


def run(name: str, check: Callable[[str, str], Any], arguments: argparse.Namespace) -> bool:
    started = time.monotonic()
    try:
        check(arguments.url, arguments.model)
    except Exception as error:
        print(f"FAILED {name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        traceback.print_exc(limit=-2, file=sys.stderr)
        return False
    print(f"passed {name} ({time.monotonic() - started:.1f} s)", flush=True)
    return True


if __name__ == "__main__":
    sys.exit(main())
