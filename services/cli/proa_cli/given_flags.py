"""The flags that `proa serve` is given: words of the command line, and files of them in YAML."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from proa_cli import vllm_flags


@dataclass(frozen=True, slots=True)
class GivenFlag:
    """A flag and the words with which it was given."""

    name: str  # long, without "no-" in front
    words: tuple[str, ...]

    @property
    def value(self) -> str:
        """Its one value. Raises `ValueError` if it has none."""
        value = self.words[0].partition("=")[2] or (self.words[1] if len(self.words) > 1 else "")
        if not value:
            raise ValueError(f"{self.name} needs a value")
        return value


def read_words(words: Sequence[str]) -> Iterator[GivenFlag]:
    """Yield the flags of a command line, each with the words up to the next one. Raises `ValueError`."""
    current: list[str] = []
    for word in words:
        if word.startswith("-") and not word[1:2].isdigit():
            if current:
                yield _flag(current)
            current = [word]
        elif not current:
            raise ValueError(f"{word!r} is not a flag; only one model can be served")
        else:
            current.append(word)
    if current:
        yield _flag(current)


def read_file(path: Path) -> Iterator[GivenFlag]:
    """Yield the flags of a YAML file: names without hyphens in front; true and false for flags without values, lists
    for those that can be repeated, mappings for those in JSON. Raises `ValueError`."""
    try:
        content = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ValueError(f"--config {path}: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        raise ValueError(f"--config {path} is not YAML: {_in_one_line(error)}") from None
    if content is None:  # comments only
        return
    if not isinstance(content, Mapping):
        raise ValueError(f"--config {path} must be a mapping of flags to values")
    for name, value in content.items():
        flag = _flag(_words(str(name), value))
        if flag.name == "--config":
            raise ValueError(f"--config {path} names another file by {name}, which is not read")
        yield flag


def _flag(words: Sequence[str]) -> GivenFlag:
    """Names may have underscores in place of hyphens, as in vLLM."""
    name, value = vllm_flags.expand(words[0])
    return GivenFlag(vllm_flags.positive(name), (name if value is None else f"{name}={value}", *words[1:]))


def _in_one_line(error: Exception) -> str:
    """The reason and the place, without the lines of the file, which may have keys."""
    if not isinstance(error, yaml.MarkedYAMLError) or error.problem_mark is None:
        return " ".join(str(error).split())
    return f"{error.problem}, line {error.problem_mark.line + 1}, column {error.problem_mark.column + 1}"


def _words(name: str, value: Any) -> list[str]:
    flag = f"--{name.replace('_', '-')}"
    match value:
        case True:
            return [flag]
        case False:
            positive = vllm_flags.positive(flag)
            return [positive if positive != flag else f"--no-{flag[2:]}"]
        case None:
            raise ValueError(f"{name} of the file of --config has no value")
        case list():
            return [flag, *map(_text, value)]
        case _:
            return [f"{flag}={_text(value)}"]


def _text(value: Any) -> str:
    return json.dumps(value) if isinstance(value, dict | list) else str(value)
