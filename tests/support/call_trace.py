"""CallTrace: which functions of a package run while something happens. Shows how many files a reader must open."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any


@dataclass(slots=True)
class CallTrace:
    """`functions`: each function's file in the package, and its qualified name. Comprehensions are not functions."""

    functions: set[tuple[str, str]] = field(default_factory=set)

    @property
    def files(self) -> set[str]:
        return {file for file, _ in self.functions}

    def __str__(self) -> str:
        names = {file: sorted(name for path, name in self.functions if path == file) for file in sorted(self.files)}
        lines = [f"{file}: {', '.join(functions)}" for file, functions in names.items()]
        return "\n".join([*lines, f"{len(self.files)} files, {len(self.functions)} functions"])


@contextmanager
def traced_calls(package: ModuleType, *parts: str) -> Iterator[CallTrace]:
    """Record the calls of functions in `package`, or in some `parts` of it, on this thread and on those it starts."""
    root, trace = Path(package.__path__[0]), CallTrace()
    prefix = f"{root}/"

    def on_event(frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(prefix) and not code.co_name.startswith("<"):
            file = code.co_filename.removeprefix(prefix)
            if not parts or file.split("/")[0] in parts:
                trace.functions.add((file, code.co_qualname))

    threading.setprofile(on_event)
    sys.setprofile(on_event)
    try:
        yield trace
    finally:
        sys.setprofile(None)
        threading.setprofile(None)
