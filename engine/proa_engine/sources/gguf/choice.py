"""Which GGUF file of a folder is the model, by the type of its numbers as llama.cpp and Ollama name it: `Q4_K_M`."""

import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from proa_engine.sources.gguf.header import SUFFIX, parts_of

_HUB_ID = re.compile(r"(?:hf\.co/|huggingface\.co/)?(?P<id>[^/:]+/[^/:]+):(?P<type>[\w.-]+)")
_IMAGE_ENCODER = "mmproj"  # how its file's name begins


def split_type(model: str) -> tuple[str, str] | None:
    """The hub id and the type of `ORGANISATION/MODEL:TYPE`; None for another name."""
    found = _HUB_ID.fullmatch(model)
    return (found["id"], found["type"]) if found else None


def patterns_of(file_type: str) -> list[str]:
    """The names of the files of a type, of one or several parts, for `fnmatch`; writers differ in the case."""
    return [
        f"{begin}{case}{end}{SUFFIX}"
        for case in dict.fromkeys((file_type, file_type.upper(), file_type.lower()))
        for begin in ("*[-._/]", "")
        for end in ("", "-?????-of-?????")
    ]


def choose_file(folder: Path, names: Sequence[str] = (f"*{SUFFIX}",)) -> Path | None:
    """The only model among a folder's GGUF files with such names (patterns of `fnmatch`, of paths below the folder), by
    its first part; None if there is none. Raises ValueError if there are several."""
    below = ((path, str(path.relative_to(folder))) for path in folder.glob(f"**/*{SUFFIX}"))
    found = _models(path for path, name in below if any(fnmatchcase(name, pattern) for pattern in names))
    if len(found) > 1:
        shown = ", ".join(str(path.relative_to(folder)) for path in found[:5]) + (", …" if len(found) > 5 else "")
        raise ValueError(f"{folder} has several GGUF files: give one of them as the model: {shown}")
    return found[0] if found else None


def _models(paths: Iterable[Path]) -> list[Path]:
    """The first part of each model."""
    firsts = {parts_of(path)[0] for path in paths if not path.name.startswith(_IMAGE_ENCODER)}
    return sorted(path for path in firsts if not path.is_dir())
