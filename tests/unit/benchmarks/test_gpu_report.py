"""The GPU report's plan: what each call measures, within its time; and how it goes on when smoke tests hang."""

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from benchmarks.engine import speed
from benchmarks.records import Results, write_json
from benchmarks.report.gpu_report import Reporter, checked_out
from benchmarks.report.report_stages import (
    CALL_SECONDS,
    FIRST_TESTS,
    MODES,
    PREFLIGHT,
    Mode,
    Step,
    calls,
    in_mode,
    in_small,
    smoke,
    steps_of,
)
from benchmarks.report.report_tables import report, yardstick
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


def test_the_first_call_shows_that_kernels_are_right() -> None:
    tests, *others = calls()[0]
    assert tests.stage == "correctness"
    assert {Path(name).stem for name in tests.workloads} == {f"test_gpu_{name}" for name in FIRST_TESTS}
    decodes = [f"{kind}decode-{batch}" for kind in ("profile-", "own-") for batch in (1, 64, 256)]
    sampled = ("", "penalties-", "logprobs-", "grammar-")
    decodes += [f"{kind}decode-{batch}" for kind in sampled for batch in (1, 64)]
    assert [(step.stage, list(step.workloads)) for step in others] == [
        ("Qwen3-0.6B", decodes),
        ("Llama-3.1-8B", decodes),
        ("Llama-3.1-8B-fp8", ["prefill-1x1024x10"]),
    ]


def test_all_tests_of_kernels_models_and_engines_run_in_some_call() -> None:
    files = {str(path.relative_to(ROOT)) for path in (ROOT / "tests" / "gpu").glob("test_gpu_*.py")}
    steps = [smoke(), *(step for call in calls() for step in call)]
    run = [name for step in steps if step.is_test for name in step.workloads]
    assert sorted(run) == sorted(files)


def test_the_second_call_runs_what_has_never_run_on_a_gpu() -> None:
    assert {stage for stage, _ in figures(2)} == {
        *("gpt-oss-20b", "Llama-3.1-8B int4", "Llama-3.1-8B nvfp4", "Llama-3.1-8B int8", "Qwen3-30B-A3B nvfp4"),
        *("Llama-3.1-8B", "Qwen3-VL-8B", "loading"),
    }
    assert names_of(2, "Llama-3.1-8B") >= {"ngram/repetitive-64", "invariant/decode-64"}
    assert names_of(2, "gpt-oss-20b") >= {"batch-512x1000x1000", "profile-decode-64"}


def test_the_third_call_measures_the_tiers_of_the_kv_cache_and_adapters() -> None:
    models = ("Llama-3.1-8B", "Qwen3-0.6B")
    tiers = {"host/mixed", "host/decode-1", "host/decode-64", "host/decode-256", "host/tiers-1024", "host/tiers-8192"}
    adapters = {"lora/adapters-1", "lora/adapters-64", "lora/decode-1", "lora/decode-64"}
    others = [{name for name in names_of(3, model) if not name.startswith("switch/")} for model in models]
    assert others == [tiers | adapters, tiers | {"streams/idle", "streams/one", "streams/two"}]


def test_the_third_call_runs_decodes_with_switches_and_without_in_turn() -> None:
    for model, settings in (
        ("Qwen3-0.6B", ["none", "PROA_L2_PREFETCH=8", "PROA_L2_PREFETCH=24", "PROA_DEPENDENT_LAUNCH=0"]),
        ("Llama-3.1-8B", ["none", "PROA_L2_PREFETCH=24"]),
    ):
        steps = [step for step in calls()[2] if step.stage == model and step.prefix.startswith("switch/")]
        assert [step.prefix for step in steps] == [f"switch/{each}/{run}/" for run in (1, 2) for each in settings]
        assert [step.variables() for step in steps] == 2 * [
            dict([each.split("=")]) if "=" in each else {} for each in settings
        ]
        assert {step.workloads for step in steps} == {("decode-1", "decode-8")}


def test_a_model_starts_once_for_its_table_and_profiles() -> None:
    models = ("Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-8B-fp8", "Qwen3-30B-A3B")
    profiles = {"profile-decode-1", "profile-decode-64", "profile-prefill-1x1024"}
    of_tables = [(step.stage, step.workloads) for step in calls()[3] if "start" in step.workloads]
    assert [(stage, set(workloads) - {"own-mixed"}) for stage, workloads in of_tables] == [
        (model, {*speed.TABLE, *profiles}) for model in models
    ]
    for _, workloads in of_tables:
        assert workloads[:3] == ("start", "decode-1", "decode-64")
        assert set(workloads[-3:]) == profiles


def test_two_calls_measure_the_sampling_that_models_have_by_default() -> None:
    own = {each for call in (4, 5) for each in figures(call) if each[1].startswith("own-")}
    models = ("Llama-3.1-8B", "Qwen3-0.6B", "Llama-3.1-8B-fp8", "Qwen3-30B-A3B")
    assert own == {
        *((model, f"own-decode-{batch}") for model in models for batch in (1, 64, 256)),
        *((model, "own-mixed") for model in models[:2]),
        ("Qwen3-0.6B", "own-http-64x1"),
    }


def test_the_calls_measure_all_that_the_tables_have() -> None:
    http = ["serve-start", "http-64x1", "http-256x2"]
    over_http = [each for call in (4, 5) for each in figures(call) if each[1] in http]
    assert over_http == [(model, name) for model in ("Qwen3-0.6B", "Llama-3.1-8B") for name in http]
    measured = {each for call in range(1, len(calls()) + 1) for each in figures(call)}
    wanted = {(stage, name) for stage, model in yardstick()["models"].items() for name in model}
    assert {name for _, name in wanted - measured} == {"title"}


def test_the_last_call_runs_another_engine_beside_proa_by_one_program() -> None:
    for model in ("Llama-3.1-8B", "Qwen3-0.6B"):
        names = {name for name in names_of(6, model) if name.startswith("generate/")}
        sides = [{name for name in names if f"/{package}/" in name} for package in ("proa_engine", "vllm")]
        assert len({frozenset(Path(name).name for name in side) for side in sides}) == 1
        assert all(sides)
    assert [step.needs for step in calls()[5][:4]] == ["engine", "peer", "engine", "peer"]


def test_programs_read_the_commands_of_all_calls_also_with_a_tiny_model() -> None:
    for call in range(1, len(calls()) + 1):
        check_commands(calls()[call - 1])
        check_commands([in_small(step, Path("model"), Path("test_card.py")) for step in calls()[call - 1]])


def test_kernels_of_a_call_with_a_tiny_model_are_interpreted_in_every_mode() -> None:
    steps = [in_small(step, Path("model"), Path("test_card.py")) for call in calls() for step in call]
    kernels = [step for step in steps if step.program.startswith("kernels.")]
    assert len(kernels) == 3
    for mode in (Mode(), *MODES):
        assert {in_mode(step, mode).variables()["TRITON_INTERPRET"] for step in kernels} == {"1"}


def check_commands(steps: Sequence[Step]) -> None:
    for step in steps:
        parser = import_module(f"benchmarks.{step.program}").parser()
        parsed = parser.parse_args(step.command(step.workloads, Path("out.json"))[3:])
        assert tuple(map(str, parsed.workloads)) == step.workloads


def test_every_call_begins_with_the_smoke_tests() -> None:
    assert all(steps_of(call)[0] == smoke() for call in (*range(1, len(calls()) + 1), None))


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


def test_a_record_has_the_commit_that_was_checked_out(tmp_path: Path) -> None:
    write_json(tmp_path / "of_program.json", {"records": {"decode-1": {"value": 4.1, "unit": "ms a step"}}})
    results = Results(tmp_path, commit="1234abcd+")
    results.take("Llama-3.1-8B", tmp_path / "of_program.json", "host/", "")
    assert results.records("Llama-3.1-8B")["host/decode-1"]["commit"] == "1234abcd+"
    assert "Commit 1234abcd+." in report(results.stages, yardstick())
    assert re.fullmatch(r"([0-9a-f]{8,}\+?)?", checked_out())
