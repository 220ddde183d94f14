"""The model that comes with the engine, `--model builtin`, its adapters and its drafter, which training/README.md
describes."""

from importlib.resources import files
from pathlib import Path


def builtin_model_folder() -> Path:
    """The Hugging Face folder of the built-in model, inside this package."""
    return Path(str(files(__package__) / "model"))


def builtin_adapter_folder(name: str) -> Path:
    """The folder of one of its LoRA adapters, in `peft`'s form."""
    return Path(str(files(__package__) / "adapters" / name))


def builtin_drafter_folder() -> Path:
    """The folder of its drafter, an EAGLE-3 layer in the form of the `speculators` library."""
    return Path(str(files(__package__) / "drafter"))
