"""The engine's image serves what docs/models.md promises: its lock has all packages that the models need.

As a program, which the test runs with those packages alone: read a configuration of every architecture of the page.
Prints a line for each that fails, and their number.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from proa_engine.models import read_config
from proa_engine.models.registry import ENCODERS, NAMES_OF_LLAMA
from support.renamed_models import STORED
from support.transformers_sweep import PAGE, read_page
from support.transformers_types import tiny_config

# What `transformers` does not have, with the type that it is like.
TYPES_OF_OTHERS = {
    **dict.fromkeys(NAMES_OF_LLAMA, "llama"),
    **{name: stored.model_type for name, stored in STORED.items()},
    "MiMoForCausalLM": "qwen2",
    "MiniCPMForCausalLM": "granite",
}

ROOT = Path(__file__).parents[2]
LOCK = ROOT / "requirements" / "engine.lock"
PACKAGES = [ROOT / name for name in ("engine", "protos", "tests")]


def test_every_architecture_of_the_page_is_read_with_the_packages_of_the_engines_lock() -> None:
    command = [sys.executable, "-m", "support.only_packages", str(LOCK), __file__]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, PACKAGES))}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "147 architectures\n"


def main() -> None:
    for architecture, model_type in sorted(architectures().items()):
        try:
            read_config.from_dicts(fields(model_type, architecture), {})
        except Exception as error:
            print(f"{architecture}: {error}", flush=True)
    print(f"{len(architectures())} architectures")


def architectures() -> dict[str, str]:
    """The type of each architecture: those of the page's tables, encoders, and types through `transformers`."""
    from transformers.models.auto import modeling_auto as auto

    types = dict(_types_of_classes(auto)) | TYPES_OF_OTHERS
    adapted = [
        auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[name] for name, outcome in read_page().items() if outcome == "equal"
    ]
    named = re.findall(r"`(\w+For(?:CausalLM|ConditionalGeneration))`", PAGE.read_text())
    return {name: types[name] for name in [*named, *adapted, *ENCODERS]}


def fields(model_type: str, architecture: str) -> dict[str, Any]:
    from transformers import CONFIG_MAPPING

    config = CONFIG_MAPPING[model_type]() if architecture in ENCODERS else tiny_config(model_type)
    return {**config.to_dict(), "architectures": [architecture]}


def _types_of_classes(auto: Any) -> Iterator[tuple[str, str]]:
    for name in dir(auto):
        if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES"):
            for model_type, classes in getattr(auto, name).items():
                yield from ((each, model_type) for each in ([classes] if isinstance(classes, str) else classes))


if __name__ == "__main__":
    main()
