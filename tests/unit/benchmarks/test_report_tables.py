"""The tables of benchmark figures: Proa's beside goals and floors, missing ones marked, the document as generated."""

from typing import Any

import pytest

from benchmarks.records import read_stages
from benchmarks.report.report_tables import DOCUMENT, MEASURED, NOT_YET, insert, report, tables, yardstick


def results(**records: float) -> dict[str, Any]:
    values = {name.replace("_", "-"): {"value": value, "unit": "ms"} for name, value in records.items()}
    return {"Llama-3.1-8B": {"machine": "2026-01-01, a card", "records": values, "problems": {}}}


def row(text: str, title: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {title}"))


def test_figures_stand_beside_goals_and_floors_and_missing_ones_are_marked() -> None:
    text = tables(results(decode_1=4.1234), yardstick()).partition("Llama-3.1-8B bf16")[2]
    assert row(text, "decode, ms a step, batch 1 ") == "| decode, ms a step, batch 1 | **4.12** | 3.85 | 3.53 |"
    assert row(text, "prefill 1x8192") == f"| prefill 1x8192, ms | {NOT_YET} | no slower |  |"
    noted = results(decode_8=5.0)
    noted["Llama-3.1-8B"]["records"]["decode-8"]["note"] = "without CUDA graphs"
    assert "| **5.00** (without CUDA graphs) |" in row(
        tables(noted, yardstick()).partition("Llama-3.1-8B bf16")[2], "decode, ms a step, batch 8"
    )
    assert "2026-01-01, a card" in tables(results(decode_1=4.1), yardstick())


def test_another_engine_that_did_the_same_work_has_a_column() -> None:
    known = {"models": {"Llama-3.1-8B": {"title": "8B", "peer": "vLLM", "decode-1": {"peer": 4.98}, "mixed": {}}}}
    table = tables(results(decode_1=4.1234), known).partition("\n\n")[2].partition("\n\n")[0].splitlines()
    assert table == [
        "| 8B | vLLM | Proa | goal | floor |",
        "| --- | ---: | ---: | ---: | ---: |",
        f"| offline mixed, output tok/s |  | {NOT_YET} |  |  |",
        "| decode, ms a step, batch 1 | 4.98 | **4.12** |  |  |",
    ]


def test_http_is_compared_with_the_same_requests_offline() -> None:
    measured = results(closed_64=10_000.0)
    over_http = {"value": 9_800.0, "ttft_ms_p50": 1, "ttft_ms_p99": 2, "inter_token_ms_p50": 3, "inter_token_ms_p99": 4}
    measured["Llama-3.1-8B"]["records"]["http-64x1"] = over_http
    line = row(tables(measured, yardstick()), "Llama-3.1-8B, 64 clients, 1 gateway")
    assert line.endswith("| **9,800** | **10,000** | 98.0% | 1 / 2 | 3 / 4 |")


def test_decodes_that_are_sampled_otherwise_stand_beside_the_plain_ones() -> None:
    measured = results(decode_1=4.1, own_decode_1=4.125, grammar_decode_1=4.04, penalties_decode_64=6.2)
    text = report(measured, yardstick())
    assert row(text, "own-decode-1") == "| own-decode-1 | 4.12 | 4.10 | +25 |"
    assert row(text, "grammar-decode-1 | 4.04 | 4.10") == "| grammar-decode-1 | 4.04 | 4.10 | -60 |"
    assert "penalties-decode-64 | 6.20 | ms" in text


def test_decodes_with_a_switch_stand_beside_those_without() -> None:
    measured = results()
    records = measured["Llama-3.1-8B"]["records"]
    for name, value in (("none/1", 4.0), ("L2=8/1", 3.9), ("none/2", 4.2), ("L2=8/2", 3.89)):
        records[f"switch/{name}/decode-1"] = {"value": value, "unit": "ms a step"}
    line = row(report(measured, yardstick()), "`L2=8`")
    assert line == "| `L2=8` | decode-1 | 3.90, 3.89 | 4.00, 4.20 | 0.950 |"


def test_only_the_text_between_the_marks_is_replaced() -> None:
    text = "before\n<!-- tables -->\nold\n<!-- /tables -->\nafter"
    assert insert(text, "new") == "before\n<!-- tables -->\nnew\n<!-- /tables -->\nafter"
    with pytest.raises(ValueError, match="marks of the tables are missing"):
        insert("before", "new")


def test_the_document_has_the_tables_of_the_measured_figures() -> None:
    text = DOCUMENT.read_text()
    assert insert(text, tables(read_stages(MEASURED), yardstick())) == text, (
        "run python -m benchmarks.report.report_tables"
    )
