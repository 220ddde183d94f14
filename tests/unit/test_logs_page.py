"""docs/logs.md has the lines that the programs write, with all their fields."""

import re
from pathlib import Path

from proa.contract import SchedulerStats
from proa_engine.observability.progress import Progress
from proa_engine.observability.stats_log import Interval, StatsLog, Totals

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "logs.md").read_text()


def section(title: str) -> str:
    return PAGE.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_line_of_every_10_seconds_and_its_fields_are_on_the_page() -> None:
    stats = SchedulerStats(
        num_running_reqs=3, num_waiting_reqs=1, kv_cache_usage=0.125, prefix_cache_queries=4, prefix_cache_hits=1
    )
    interval = StatsLog(Totals()).next(Totals(250, 1234, stats), seconds=10.0)
    assert interval is not None
    line = interval.line("GPU KV cache")
    text = section("Every 10 seconds")
    assert f"INFO {line}\n" in text
    rows = re.findall(r"^\| [^|]+ \| (`[^|]+`) \|", text, re.M)
    assert re.findall(r"`(\w+)`", " ".join(rows)) == list(Interval.__slots__)


def test_the_progress_of_the_start_is_on_the_page() -> None:
    now = 0.0
    lines: list[str] = []
    weights = Progress(lines.append, "loading weights", 140e9, "GB", scale=1e9, now=lambda: now)
    steps = Progress(lines.append, "warming up", 40, "steps", now=lambda: now)
    now = 5.0
    weights.add(10e9)
    now = 8.0
    steps.add(10)
    assert len(lines) == 2
    for line in lines:
        assert f"INFO {line}\n" in section("Start")


def test_messages_of_the_page_are_in_the_programs() -> None:
    sources = "".join(path.read_text() for path in sorted(ROOT.glob("services/gateway/proa_gateway/**/*.py")))
    for message in re.findall(r"^\| `([^`]+)`", section("Engines, as the gateway sees them"), re.M):
        first = message.partition(":")[0].partition(" 12 ")[0].partition(" 2 ")[0].partition(" VERSION")[0]
        word = first.removeprefix("engine ").partition(" ")[0]
        assert word in sources, message
