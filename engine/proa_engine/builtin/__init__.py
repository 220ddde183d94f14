"""The model that comes with the engine, `--model builtin`. training/README.md describes it."""

from importlib.resources import files
from pathlib import Path


def builtin_model_folder() -> Path:
    """The Hugging Face folder of the built-in model, inside this package."""
    return Path(str(files(__package__) / "model"))
