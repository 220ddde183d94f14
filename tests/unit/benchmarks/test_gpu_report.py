"""The GPU report's plan: what each call measures, within its time; and how it goes on when smoke tests hang."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cache import kv_tiers, prefill_decode
from benchmarks.engine import load_weights, speed
from benchmarks.http import serve
from benchmarks.records import Results, write_json
from benchmarks.report.gpu_report import Reporter
from benchmarks.report.report_stages import CALL_SECONDS, PREFLIGHT, Mode, Step, calls, smoke, steps_of
from benchmarks.report.report_tables import yardstick
from benchmarks.report.watched import Outcome

ROOT = Path(__file__).parents[3]


def figures(call: int) -> list[tuple[str, str]]:
    """What a call measures, in order."""
    steps = [step for step in calls()[call - 1] if not step.is_test]
    return [(step.stage, name) for step in steps for name in step.names(step.workloads)]


def names_of(call: int, stage: str) -> set[str]:
    return {name for each, name in figures(call) if each == stage}


def test_the_limits_of_a_call_fit_its_time() -> None:
    first, *others = calls()
    assert smoke().seconds + sum(step.seconds for step in first) <= CALL_SECONDS
    for call in others:
        assert sum(step.seconds for step in call) <= CALL_SECONDS


def test_a_model_starts_once_for_its_table_and_profiles() -> None:
    models = ("Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-8B-fp8", "Qwen3-30B-A3B")
    profiles = {"profile-decode-1", "profile-decode-64", "profile-prefill-1x1024"}
    first = [(step.stage, step.workloads) for step in calls()[0]]
    in_order = [*first[:3], *((step.stage, step.workloads) for step in calls()[1][:1])]
    assert [(stage, set(workloads) - {"own-mixed"}) for stage, workloads in in_order] == [
        (model, {*speed.TABLE, *profiles}) for model in models
    ]
    assert first[3:] == [(model, ("restart",)) for model in models[:2]]
    for _, workloads in in_order:
        assert workloads[:3] == ("start", "decode-1", "decode-64")
        assert set(workloads[-3:]) == profiles


def test_two_calls_measure_the_sampling_that_models_have_by_default() -> None:
    own = {each for call in (1, 2) for each in figures(call) if each[1].startswith("own-")}
    models = ("Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-8B-fp8", "Qwen3-30B-A3B")
    assert own == {
        *((model, f"own-decode-{batch}") for model in models for batch in (1, 64, 256)),
        *((model, "own-mixed") for model in models[:2]),
        ("Qwen3-0.6B", "own-http-64x1"),
    }
    check_commands(2, {"engine.speed": speed, "http.serve": serve})


def test_the_second_call_measures_what_the_tables_still_lack() -> None:
    http = ["serve-start", "http-64x1", "http-256x2"]
    over_http = [each for each in figures(2) if each[1] in http]
    assert over_http == [(model, name) for model in ("Qwen3-0.6B", "Llama-3.1-8B") for name in http]
    measured = {each for call in (1, 2) for each in figures(call)}
    wanted = {(stage, name) for stage, model in yardstick()["models"].items() for name in model}
    missing = {name for _, name in wanted - measured} - {"title", "peer"}
    assert missing == {"http-1x1", "http-16x1"}  # of few clients: in the fourth call
    assert {name for _, name in figures(4)} >= missing


def test_the_third_call_is_correctness_and_then_profiles_of_long_prompts() -> None:
    assert calls()[2][0].stage == "correctness"
    assert figures(3)[:2] == [(model, "profile-prefill-8x8192") for model in ("Llama-3.1-8B", "Qwen3-0.6B")]


def test_the_fifth_call_measures_the_tiers_of_the_kv_cache_and_loading() -> None:
    models = ("Llama-3.1-8B", "Qwen3-0.6B")
    decodes = {"host/mixed", "host/decode-1", "host/decode-64", "host/decode-256"}
    streams = {"streams/idle", "streams/one", "streams/two"}
    assert names_of(5, models[0]) == decodes | {"host/tiers-1024", "host/tiers-8192"}
    assert names_of(5, models[1]) == names_of(5, models[0]) | streams
    assert names_of(5, "loading") == {"ahead", "one-by-one"}
    programs = {
        "cache.kv_tiers": kv_tiers,
        "cache.prefill_decode": prefill_decode,
        "engine.speed": speed,
        "engine.load_weights": load_weights,
    }
    check_commands(5, programs)


def check_commands(call: int, programs: Mapping[str, Any]) -> None:
    """The programs of a call read their commands."""
    for step in calls()[call - 1]:
        parsed = programs[step.program].parser().parse_args(step.command(step.workloads, Path("out.json"))[3:])
        assert tuple(parsed.workloads) == step.workloads


def test_every_call_begins_with_the_smoke_tests() -> None:
    assert all(steps_of(call)[0] == smoke() for call in (1, 2, 3, 4, 5, None))


def test_a_test_that_hangs_ends_before_the_step_of_the_smoke_tests() -> None:
    of_engine = re.findall(r"timeout\((\d+)\)", (ROOT / "tests" / "gpu" / "test_gpu_smoke.py").read_text())
    assert (smoke().arguments[-1], of_engine, smoke().seconds) == ("--timeout=45", ["100"], 240)
    assert 100 < smoke().silence < smoke().seconds


@pytest.fixture
def reporter(tmp_path: Path) -> Iterator[Reporter]:
    """A report after its preflight."""
    good: dict[str, Any] = {name: {"complete": True} for name in PREFLIGHT.workloads}
    with closing(Reporter(tmp_path, 60.0, tmp_path)) as reporter:
        reporter.results = Results(tmp_path, {"preflight": {"machine": "", "records": good, "problems": {}}})
        yield reporter


def run_hanging_tests(command: Sequence[str], *, env: Mapping[str, str], **_: object) -> Outcome:
    """In place of `run_watched`: a program of tests, the last of which hangs where launches depend on each other."""
    hangs = env.get("PROA_DEPENDENT_LAUNCH") != "0"
    path = next(Path(each.removeprefix("--json=")) for each in command if each.startswith("--json="))
    record = {"passed": ["test_kernels"], "skipped": [], "failed": {}, "complete": not hangs}
    write_json(path, {"records": {"tests": record}})
    return Outcome("ran past its limit" if hangs else None, [], out_of_time=hangs)


def test_smoke_tests_that_run_out_of_time_are_tried_in_other_modes(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.report.gpu_report.run_watched", run_hanging_tests)
    reporter.run(replace(smoke(), workloads=("tests",)))
    stage = reporter.results.stages["smoke"]
    assert stage["problems"]["tests"]["out_of_time"]
    assert stage["records"]["tests"]["passed"] == ["test_kernels"]
    assert stage["problems"]["without CUDA graphs/tests"]["out_of_time"]
    assert stage["records"]["without dependent launch/tests"]["complete"]
    assert reporter.mode.name == "without dependent launch"

    monkeypatch.setattr(
        "benchmarks.report.gpu_report.run_watched", lambda *_, **__: pytest.fail("they hung in an earlier call")
    )
    reporter.mode = Mode()
    reporter.run(replace(smoke(), workloads=("tests",)))
    assert reporter.mode.name == "without dependent launch"


def test_other_tests_that_run_out_of_time_are_left_for_the_next_call(
    reporter: Reporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.report.gpu_report.run_watched", run_hanging_tests)
    reporter.run(replace(smoke(), stage="correctness", workloads=("tests",)))
    assert list(reporter.results.stages["correctness"]["records"]) == ["tests"]


def test_a_step_may_use_what_the_steps_before_it_left(reporter: Reporter, monkeypatch: pytest.MonkeyPatch) -> None:
    limits: list[float] = []
    now = time.monotonic() + 100.0
    monkeypatch.setattr("benchmarks.report.gpu_report.time.monotonic", lambda: now)
    monkeypatch.setattr(reporter, "_run", lambda step, ends: limits.append(round(ends - now)))
    step = Step(stage="figures", program="none", workloads=("mixed",), seconds=20.0)
    for passed in (0.0, 5.0, 95.0):
        now += passed
        reporter.run(step)
    assert limits == [20, 35, 20]
