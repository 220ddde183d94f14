"""Records of a GPU report: a JSON file that is complete after every figure, and from which a later run goes on.

{"stages": {stage: {"machine": text, "records": {workload: record}, "problems": {workload: {"problem", "tail"}}}}}

A record whose `complete` is false is measured again. `commit` of a record is what was checked out when it was made.
"""

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

FILE = "results.json"
Document = dict[str, Any]


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace the file at once: whoever reads it, and whenever this process is killed, finds a whole document."""
    scratch = path.with_name(f"{path.name}.{os.getpid()}")
    scratch.write_text(json.dumps(document, indent=1))
    scratch.replace(path)


def read_stages(folder: Path) -> Document:
    """The stages of the report in a folder; none if there is no report."""
    path = folder / FILE
    stages: Document = json.loads(path.read_text())["stages"] if path.is_file() else {}
    return stages


def gpu_of(stages: Mapping[str, Any]) -> str:
    """The GPU that these were measured on; empty if unknown."""
    name: str = stages.get("preflight", {}).get("records", {}).get("gpu", {}).get("name", "")
    return name


class Results:
    """The records of a run, on disk after every change. `stages`: those to begin with. `commit`: of new records; empty
    if not known."""

    def __init__(self, folder: Path, stages: Document | None = None, commit: str = "") -> None:
        self._path = folder / FILE
        self._commit = commit
        self.stages: Document = stages or {}

    def join(self, earlier: Document, again: Sequence[str]) -> None:
        """Take over what an earlier run measured, but for the records `stage/workload` that match one of `again`."""
        for name, theirs in earlier.items():
            if name == "preflight":
                continue
            ours = self._stage(name)
            ours["machine"] = theirs["machine"] or ours["machine"]
            for kind in ("records", "problems"):
                ours[kind] |= {
                    workload: value
                    for workload, value in theirs[kind].items()
                    if not any(fnmatch(f"{name}/{workload}", pattern) for pattern in again)
                }
        self._write()

    def records(self, stage: str) -> Document:
        records: Document = self._stage(stage)["records"]
        return records

    def missing(self, stage: str, workloads: Iterable[str]) -> list[str]:
        records = self.records(stage)
        return [name for name in workloads if not records.get(name, {"complete": False}).get("complete", True)]

    def failed(self, stage: str, workloads: Iterable[str], *, or_out_of_time: bool = False) -> list[str]:
        """Those that failed, rather than had no time; `or_out_of_time`: also those that were ended at their limit."""
        records, problems = self.records(stage), self._stage(stage)["problems"]
        return [
            name
            for name in self.missing(stage, workloads)
            if records.get(name, {}).get("failed")
            or (name in problems and (or_out_of_time or not problems[name]["out_of_time"]))
        ]

    def take(self, stage: str, path: Path, prefix: str, note: str) -> None:
        """Add what a program has recorded so far in its own file, if anything."""
        if not path.is_file():
            return
        document = json.loads(path.read_text())
        ours = self._stage(stage)
        ours["machine"] = document.get("machine", ours["machine"])
        for name, record in document["records"].items():
            if note:
                record["note"] = "; ".join(filter(None, (record.get("note"), note)))
            if self._commit:
                record["commit"] = self._commit
            ours["records"][prefix + name] = record
            ours["problems"].pop(prefix + name, None)
        self._write()

    def fail(self, stage: str, workload: str, problem: str, tail: Sequence[str] = (), *, out_of_time: bool) -> None:
        self._stage(stage)["problems"][workload] = {
            "problem": problem,
            "tail": list(tail),
            "out_of_time": out_of_time,
        }
        self._write()

    def _stage(self, name: str) -> Document:
        stage: Document = self.stages.setdefault(name, {"machine": "", "records": {}, "problems": {}})
        return stage

    def _write(self) -> None:
        write_json(self._path, {"stages": self.stages})


class Recording:
    """The file of one program, from which the report takes its records: `head`, and {"records": {workload: record}}.
    Written after every record, if there is a `path`."""

    def __init__(self, path: Path | None, **head: Any) -> None:
        self._path = path
        self.document: Document = {**head, "records": {}}

    def add(self, workload: str, record: Mapping[str, Any]) -> None:
        self.document["records"][workload] = record
        if self._path is not None:
            write_json(self._path, self.document)
