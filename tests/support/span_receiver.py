"""A pod that receives the traces of a release."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from support import otlp
from support.kube import Release
from support.script_pod import script_pod


@dataclass(frozen=True, slots=True)
class Span:
    trace_id: str
    span_id: str
    parent_id: str
    name: str
    attributes: Mapping[str, Any] = field(default_factory=dict)


@contextmanager
def span_receiver(release: Release) -> Iterator[tuple[str, Callable[[], list[Span]]]]:
    """An OTLP receiver: its endpoint, and what returns the spans it has received."""

    def spans() -> list[Span]:
        lines = release.kubectl("logs", "otlp", "--tail=-1").splitlines()
        records = [json.loads(line) for line in lines if line.startswith("{")]
        return [Span(*(record[each.name] for each in fields(Span))) for record in records]

    with script_pod(release, "otlp", Path(otlp.__file__), "0.0.0.0:4317", port=4317):
        yield f"http://{release.get('pod', 'otlp')['status']['podIP']}:4317", spans
