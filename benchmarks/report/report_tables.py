"""Figures of `make gpu-report` as Markdown tables, beside the goals and floors of h200.json.

    python -m benchmarks.report.report_tables

rewrites the tables of docs/performance.md between their marks, from the results.json of a run in docs/measured. Missing
figures are shown as not measured yet. A `peer` in h200.json, the name of another engine and its figures, adds a column:
only of figures that it reached with the requests of same_work.json, on the same card in the same hours.
"""

import argparse
import json
import statistics
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from benchmarks.engine.bench import split_sampling
from benchmarks.engine.speed import THROUGHPUT
from benchmarks.records import read_stages
from benchmarks.report.report_stages import SWITCHED

_ROOT = Path(__file__).parents[2]
MEASURED = _ROOT / "docs" / "measured"
DOCUMENT = _ROOT / "docs" / "performance.md"
_MARKS = ("<!-- tables -->\n", "\n<!-- /tables -->")
NOT_YET = "not measured yet"
ROWS = {
    "mixed": "offline mixed, output tok/s",
    THROUGHPUT: "offline, 512 requests of 1000 + 1000 tokens, output tok/s",
    **{f"decode-{batch}": f"decode, ms a step, batch {batch}" for batch in (1, 8, 32, 64, 128, 256)},
    "prefill-1x1024": "prefill 1x1024, ms to the first token",
    **{f"prefill-{size}": f"prefill {size}, ms" for size in ("1x8192", "32x1024", "8x8192")},
    **{f"own-decode-{batch}": f"own sampling: decode, ms a step, batch {batch}" for batch in (1, 64, 256)},
    "own-mixed": "own sampling: offline mixed, output tok/s",
    "start": "start to ready, nothing cached, s",
}
_HTTP = {"http-1x1": "closed-1", "http-16x1": "closed-16", "http-64x1": "closed-64", "http-256x2": "closed-256"}
_LATENCIES = {"ttft_ms": "ms to the first token", "inter_token_ms": "ms between tokens"}

Record = Mapping[str, Any]  # of one workload
Results = Mapping[str, Mapping[str, Any]]  # by stage: as in `records`
Yardstick = Mapping[str, Any]  # h200.json


def yardstick() -> Yardstick:
    document: Yardstick = json.loads(Path(__file__).with_name("h200.json").read_text())
    return document


def tables(results: Results, known: Yardstick) -> str:
    """A table for each model, then one for HTTP."""
    blocks = [_model_table(_records(results, stage), model) for stage, model in known["models"].items()]
    return "\n\n".join([*_machines(results), *blocks, _http_table(results, known)])


def report(results: Results, known: Yardstick) -> str:
    """Everything that a run measured."""
    commits = {record.get("commit", "") for stage in results for record in _records(results, stage).values()}
    sections = ["# GPU report", *(f"Commit {commit}." for commit in sorted(commits - {""})), tables(results, known)]
    for stage in ("smoke", "correctness"):
        sections += _tests(stage, _records(results, stage))
    for stage, document in results.items():
        sections += [f"## {stage}", *_details(document)]
    return "\n\n".join(sections) + "\n"


def insert(text: str, block: str) -> str:
    """`text` with `block` in place of what stands between the marks. Raises `ValueError` if a mark is missing."""
    start, end = _MARKS
    before, _, rest = text.partition(start)
    _, mark, after = rest.partition(end)
    if not mark:
        raise ValueError(f"{DOCUMENT.name}: the marks of the tables are missing")
    return before + start + block + end + after


def _model_table(records: Record, model: Record) -> str:
    """Rows of what is known or measured of the model."""
    peer = ["peer"] if "peer" in model else []
    rows = []
    for name, title in ROWS.items():
        if name in model or name in records:
            peers, goals = ([_known(model, name, kind) for kind in kinds] for kinds in (peer, ("goal", "floor")))
            rows.append([title, *peers, _ours(records, name), *goals])
    return _table([model["title"], *(model[each] for each in peer), "Proa", "goal", "floor"], rows)


def _http_table(results: Results, known: Yardstick) -> str:
    """Proa's offline figure is of the same requests as over HTTP."""
    rows = []
    for stage, model in known["models"].items():
        records = _records(results, stage)
        for name, offline in _HTTP.items():
            if name not in model and name not in records:
                continue
            clients, gateways = map(int, name.removeprefix("http-").split("x"))
            title = f"{stage}, {_count(clients, 'client')}, {_count(gateways, 'gateway')}"
            share = ""
            if name in records and offline in records:
                share = f"{records[name]['value'] / records[offline]['value']:.1%}"
            figures = [_ours(records, name), _ours(records, offline), share]
            rows.append([title, *figures, *(_latency(records.get(name), kind) for kind in _LATENCIES)])
    latencies = [f"{title}, p50 / p99" for title in _LATENCIES.values()]
    return _table(["over HTTP, tok/s", "Proa", "Proa offline", "HTTP / offline", *latencies], rows)


def _tests(stage: str, records: Record) -> Iterator[str]:
    """A file's name begins with what was switched off, if anything."""
    counted = {name: record for name, record in records.items() if "passed" in record}
    rows = [
        [
            name.replace("tests/gpu/", ""),
            *(str(len(record[kind])) for kind in ("passed", "failed", "skipped")),
        ]
        for name, record in counted.items()
    ]
    if rows:
        yield _table([stage, "passed", "failed", "skipped"], rows)
    for record in counted.values():
        yield from (f"`{name}`\n\n```\n{text[-800:]}\n```" for name, text in record["failed"].items())


def _details(document: Mapping[str, Any]) -> Iterator[str]:
    """Other figures of a stage: workloads without a table, the start's log, profiles and failures."""
    from benchmarks.engine.timeline import table

    records: Mapping[str, Record] = document["records"]
    rows = [
        [name, _number(record["value"]), record["unit"], record.get("note", "")]
        for name, record in records.items()
        if "value" in record and name not in ROWS and name not in _HTTP and not name.startswith(SWITCHED)
    ]
    if rows:
        yield _table(["more", "figure", "unit", ""], rows)
    if rows := list(_sampled_otherwise(records)):
        yield _table(["sampling", "ms a step", "plain", "µs more"], rows)
    if rows := list(_switched(records)):
        yield _table(["in the environment", "workload", "runs, ms a step", "without it", "ratio of medians"], rows)
    for name, record in records.items():
        if sweep := record.get("rows"):
            yield f"### {name}\n\n" + _table(sweep[0], [[str(cell) for cell in row.values()] for row in sweep])
        if record.get("problems"):
            yield f"**{name}**: {'; '.join(record['problems'])}"
    for name in ("start", "restart"):
        if name in records:
            yield f"The {name}:\n\n" + "\n".join(f"- {line}" for line in records[name]["log"])
    yield from (f"### {name}\n\n{table(record)}" for name, record in records.items() if "kernels" in record)
    for name, problem in document["problems"].items():
        tail = "\n".join(problem["tail"][-15:])
        yield f"**{name}**: the program {problem['problem']}" + (f"\n\n```\n{tail}\n```" if tail else "")


def _sampled_otherwise(records: Mapping[str, Record]) -> Iterator[list[str]]:
    """Decodes beside the plain ones of as many requests."""
    for name, record in records.items():
        prefix, rest = split_sampling(name)
        if prefix and rest.startswith("decode-") and rest in records:
            plain = records[rest]["value"]
            yield [name, _number(record["value"]), _number(plain), f"{(record['value'] - plain) * 1e3:+,.0f}"]


def _switched(records: Mapping[str, Record]) -> Iterator[list[str]]:
    """What was set in the environment, beside the runs of the same workload without it."""
    runs: dict[tuple[str, str], list[float]] = {}
    for name, record in records.items():
        if name.startswith(SWITCHED):
            _, setting, _, workload = name.split("/")
            runs.setdefault((setting, workload), []).append(record["value"])
    for (setting, workload), values in runs.items():
        if setting != "none" and (without := runs.get(("none", workload))):
            ratio = statistics.median(values) / statistics.median(without)
            figures = (", ".join(map(_number, each)) for each in (values, without))
            yield [f"`{setting}`", workload, *figures, f"{ratio:.3f}"]


def _machines(results: Results) -> list[str]:
    return [f"Proa: {machine}." for machine in sorted({document["machine"] for document in results.values()} - {""})]


def _records(results: Results, stage: str) -> Record:
    records: Record = results.get(stage, {}).get("records", {})
    return records


def _ours(records: Record, name: str) -> str:
    if name not in records:
        return NOT_YET
    note = records[name].get("note")
    return f"**{_number(records[name]['value'])}**" + (f" ({note})" if note else "")


def _known(model: Record, name: str, kind: str) -> str:
    """A figure of h200.json; empty if there is none."""
    value = model.get(name, {}).get(kind, "")
    return value if isinstance(value, str) else f"{value:,}"


def _latency(record: Record | None, kind: str) -> str:
    return f"{record[f'{kind}_p50']} / {record[f'{kind}_p99']}" if record else ""


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(titles)
    rule = ["---", *["---:"] * (len(titles) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in [titles, rule, *rows])


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    block = tables(read_stages(MEASURED), yardstick())
    DOCUMENT.write_text(insert(DOCUMENT.read_text(), block))


if __name__ == "__main__":
    main()
