"""The tables of figures: ours beside the others', what is missing said to be missing, the documents as generated."""

from typing import Any

import pytest
from benchmarks.report_tables import (
    DOCUMENTS,
    MEASURED,
    NOT_YET,
    insert,
    picture,
    read_results,
    tables,
    yardstick,
)


def results(**records: float) -> dict[str, Any]:
    values = {name.replace("_", "-"): {"value": value} for name, value in records.items()}
    return {"Llama-3.1-8B": {"machine": "2026-01-01, a card", "records": values, "problems": {}}}


def row(text: str, title: str) -> str:
    return next(line for line in text.splitlines() if line.startswith(f"| {title}"))


def test_a_figure_stands_between_the_others_and_what_is_missing_is_said_to_be() -> None:
    text = tables(results(decode_1=4.1234), yardstick()).partition("Llama-3.1-8B bf16")[2]
    assert row(text, "decode, ms a step, batch 1 ") == "| decode, ms a step, batch 1 | 4.98 | **4.12** | 4.2 | 3.53 |"
    assert NOT_YET in row(text, "decode, ms a step, batch 8")
    assert "2026-01-01, a card" in tables(results(decode_1=4.1), yardstick())


def test_http_is_compared_with_the_same_requests_offline() -> None:
    measured = results(closed_64=10_000.0)
    over_http = {"value": 9_800.0, "ttft_ms_p50": 1, "ttft_ms_p99": 2, "inter_token_ms_p50": 3, "inter_token_ms_p99": 4}
    measured["Llama-3.1-8B"]["records"]["http-64x1"] = over_http
    line = row(tables(measured, yardstick()), "Llama-3.1-8B, 64 clients, 1 gateway")
    assert line.endswith("| 9,490 | **9,800** | **10,000** | 98.0% | 1 / 2 | 3 / 4 |")


def test_the_picture_shows_only_what_was_measured() -> None:
    assert NOT_YET in picture({}, yardstick())
    assert "14.24 → **12.50**" in picture(results(decode_256=12.5), yardstick())


def test_a_block_is_replaced_between_its_marks_and_nowhere_else() -> None:
    text = "before\n<!-- tables -->\nold\n<!-- /tables -->\nafter"
    assert insert(text, "tables", "new") == "before\n<!-- tables -->\nnew\n<!-- /tables -->\nafter"
    with pytest.raises(ValueError, match="marks of picture"):
        insert(text, "picture", "new")


def test_the_documents_hold_the_tables_of_what_was_measured() -> None:
    measured, known = read_results(MEASURED), yardstick()
    blocks = {"tables": tables(measured, known), "picture": picture(measured, known)}
    for path, name in DOCUMENTS.items():
        text = path.read_text()
        assert insert(text, name, blocks[name]) == text, f"run tests/benchmarks/report_tables.py for {path.name}"
