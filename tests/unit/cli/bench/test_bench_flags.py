"""Every flag of `vllm bench` is a flag of `proa bench`, or gets a sentence."""

from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from proa.options import Parser, add_options, from_arguments
from proa_cli.bench import latency, vllm
from proa_cli.bench.arrivals import Burstiness
from proa_cli.bench.latency import LatencyOptions
from proa_cli.bench.options import BenchServeOptions
from proa_cli.main import main

LINES = [line.split() for line in (Path(__file__).parent / "vllm_flags.txt").read_text().splitlines()]
NAMES = {command: {name for first, *names in LINES if first == command for name in names} for command, *_ in LINES}


def flags_of(command: str) -> set[str]:
    with redirect_stdout(StringIO()) as printed, pytest.raises(SystemExit):
        main(["bench", command, "--help"])
    return {word.strip("[],|") for word in printed.getvalue().split() if word.strip("[").startswith("--")}


@pytest.mark.parametrize("command", NAMES)
def test_each_flag_of_vllm_is_known_or_has_a_reason(command: str) -> None:
    known = flags_of(command)
    assert NAMES[command] - known - vllm.REASONS.keys() == set()
    for name in NAMES[command] - known:
        with pytest.raises(ValueError, match=f"{name} is not a flag here: "):
            vllm.expanded([f"{name.replace('-', '_').replace('__', '--', 1)}=1"], known)


def test_each_reason_is_of_a_flag_of_vllm() -> None:
    assert vllm.REASONS.keys() <= set().union(*NAMES.values())


def parse(*words: str) -> BenchServeOptions:
    parser = Parser(allow_abbrev=False)
    add_options(parser, BenchServeOptions)
    return from_arguments(BenchServeOptions, parser.parse_args(words))


def test_values_are_read_as_vllm_reads_them() -> None:
    options = parse(
        *("--request-rate=inf", "--burstiness=inf", "--random-range-ratio=0.5", "--metric-percentiles=50,99.9"),
        *("--percentile-metrics=ttft,e2el", "--goodput", "ttft:100", "e2el:2000", "--input-len=9", "--output-len=8"),
    )
    assert (options.load.request_rate, options.load.burstiness) == (None, Burstiness(float("inf")))
    assert (options.dataset.lengths.ratios.inputs, options.dataset.lengths.ratios.outputs) == (0.5, 0.5)
    assert (options.dataset.lengths.inputs, options.dataset.lengths.outputs) == (9, 8)
    assert options.results.metric_percentiles == (50.0, 99.9)
    assert options.results.shown == ("ttft", "e2el")
    assert dict(options.results.goodput) == {"ttft": 100.0, "e2el": 2000.0}
    ratios = parse('--random-range-ratio={"input": 0.25, "output": 0}').dataset.lengths.ratios
    assert (ratios.inputs, ratios.outputs) == (0.25, 0.0)


def test_defaults_are_those_of_vllm() -> None:
    options = parse()
    assert options.server.api_url == "http://127.0.0.1:8000/v1/completions"
    assert parse("--backend=openai-chat", "--host=::1").server.api_url == "http://[::1]:8000/v1/chat/completions"
    assert (options.dataset.num_prompts, options.dataset.lengths.inputs, options.dataset.lengths.outputs) == (
        1000,
        1024,
        128,
    )
    assert options.results.shown == ("ttft", "tpot", "itl")
    assert options.results.metric_percentiles == (99.0,)


def test_help_shows_defaults_as_they_are_typed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["bench", "serve", "--help"])
    printed = " ".join(capsys.readouterr().out.split())
    assert "percentiles, divided by commas (default: 99.0)" in printed
    assert '{"input": RATIO, "output": RATIO} (default: 0)' in printed


@pytest.mark.parametrize("name", ["latency", "throughput"])
def test_results_that_cannot_be_written_are_refused_before_the_engine_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "missing" / "results.json"
    assert main(["bench", name, "--model=builtin", f"--output-json={path}"]) == 1
    reason = f"--output-json {path}: there is no folder {path.parent}"
    assert capsys.readouterr().err == f"proa bench {name}: error: {reason}\n"


@pytest.mark.parametrize(
    ("environment", "words", "expected"),
    [
        ({}, [], (256, False)),
        ({"PROA_MAX_NUM_SEQS": "8", "PROA_ENABLE_PREFIX_CACHING": "1"}, [], (8, True)),
        ({"PROA_MAX_NUM_SEQS": "8", "PROA_ENABLE_PREFIX_CACHING": ""}, ["--max-num-seqs=4"], (4, False)),
    ],
)
def test_a_bench_of_the_engine_reads_the_variables_of_its_flags(
    environment: dict[str, str], words: list[str], expected: tuple[int, bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    measured: list[LatencyOptions] = []
    monkeypatch.setattr(latency, "_measure", measured.append)
    for name, text in {"PROA_MODEL": "builtin", **environment}.items():
        monkeypatch.setenv(name, text)
    assert main(["bench", "latency", *words]) == 0
    config = measured[0].config
    assert (config.model, config.max_num_seqs, config.enable_prefix_caching) == ("builtin", *expected)


@pytest.mark.parametrize(
    ("word", "reason"),
    [
        ("--request-rate=0", "0 is not a number of requests a second above zero, or inf"),
        ("--request-rate=many", "many is not a number of requests a second above zero, or inf"),
        ("--base-url=localhost:8000", "'localhost:8000' is not a URL that begins with http:// or https://"),
        ("--burstiness=-1", "-1 is not a number above zero, or inf"),
        ("--random-range-ratio=1", "a range ratio must be at least 0 and below 1"),
        ("--percentile-metrics=ttft,speed", "is not a list, divided by commas, of ttft, tpot, itl, e2el"),
        ("--metric-percentiles=101", "is not a list of percentages"),
        ("--metric-percentiles=fifty", "is not a list of percentages"),
        ("--goodput=ttft", "ttft is not NAME:MILLISECONDS"),
        ("--goodput=itl:3", "with a name of ttft, tpot, e2el"),
        ("--header=secret", "secret is not KEY=VALUE"),
        ("--extra-body=[]", "is not a JSON object"),
        ("--dataset-name=sharegpt", "needs --dataset-path"),
    ],
)
def test_values_out_of_range_get_a_sentence(word: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises((ValueError, SystemExit)) as raised:
        parse(word)
    assert reason in f"{raised.value} {capsys.readouterr().err}"
