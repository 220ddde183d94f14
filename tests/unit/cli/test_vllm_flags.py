"""The flags of `vllm serve` in `proa serve`: each is a flag here too, has no effect, or is refused with a reason."""

import re
from pathlib import Path

import pytest

from proa.options import flat
from proa_cli.arguments import flags_here, read_arguments
from proa_cli.vllm_flags import SHORT_FLAGS, Kind, flag_table
from proa_engine.config import EngineConfig
from proa_gateway.images.config import ImageOptions
from support.serve_arguments import engine, gateway
from support.vllm_page import PAGE, page

NAMES = (Path(__file__).parent / "vllm_flags.txt").read_text().split()  # of vLLM 0.33.0


def test_the_list_is_that_of_vllm() -> None:
    assert len(NAMES) == len(set(NAMES)) > 300
    assert {"--enable-chunked-prefill", "--api-server-count", "--kv-transfer-config"} <= set(NAMES)


def test_each_flag_of_vllm_is_in_the_table() -> None:
    assert set(NAMES) <= flag_table().keys()
    assert set(SHORT_FLAGS.values()) <= flag_table().keys()


def test_the_table_calls_those_the_same_that_are_flags_here() -> None:
    """A flag with a name of vLLM's that is added here gets the kind SAME in proa_cli/vllm_flags.tsv."""
    same = {name for name, row in flag_table().items() if row.kind is Kind.SAME}
    assert same == flags_here() & flag_table().keys()


def test_each_row_is_one_sentence_without_a_full_stop() -> None:
    assert [
        name for name, row in flag_table().items() if not row.text or row.text.endswith(".") or ". " in row.text
    ] == []


def test_the_page_has_the_table() -> None:
    assert PAGE.read_text() == page(), "run `make pages`"


@pytest.mark.parametrize(
    ("name", "number"), re.findall(r"^\| `--([a-z-]+)` \|[^|]*\| ([\d.]+)", PAGE.read_text(), re.M)
)
def test_the_page_has_the_defaults(name: str, number: str) -> None:
    config = EngineConfig(model="m")
    computed = {
        "limit-mm-per-prompt": ImageOptions().limit_mm_per_prompt.image,
        "max-cpu-loras": config.lora.max_loaded_loras / config.lora.max_loras,
    }
    default = computed[name] if name in computed else flat(config)[name.replace("-", "_")]
    assert default == float(number)


def test_what_holds_here_is_accepted_and_noted() -> None:
    arguments = read_arguments(
        ["/m", "--enable-chunked-prefill", "--no-enable-log-requests", "--cpu_offload_gb=0", "--tokenizer-mode", "AUTO"]
    )
    assert (arguments.engine, arguments.gateway) == (engine("--model=/m"), gateway())
    assert [note.partition(":")[0] for note in arguments.notes] == [
        "--enable-chunked-prefill has no effect",
        "--no-enable-log-requests has no effect",
        "--cpu-offload-gb 0 has no effect",
        "--tokenizer-mode auto has no effect",
    ]


@pytest.mark.parametrize("value", [["--no-enable-chunked-prefill"], ["--enable-chunked-prefill=false"]])
def test_a_value_that_contradicts_what_holds_here_is_refused(value: list[str]) -> None:
    with pytest.raises(ValueError, match=r"chunked-prefill.* is not supported: long prompts are always computed in"):
        read_arguments(["/m", *value])


def test_a_flag_that_is_found_elsewhere_is_refused_with_the_place() -> None:
    with pytest.raises(
        ValueError, match=r"--otlp-traces-endpoint is not a flag of `proa serve`: .*OTEL_EXPORTER_OTLP_E"
    ):
        read_arguments(["/m", "--otlp-traces-endpoint=http://collector:4317"])


def test_a_value_that_may_be_a_secret_is_not_shown() -> None:
    with pytest.raises(ValueError, match=r"^--hf-token is not a flag of `proa serve`: the variable `HF_TOKEN`$"):
        read_arguments(["/m", "--hf-token", "hf_abc"])


@pytest.mark.parametrize("words", [["-O2"], ["-O=2"], ["-O", "2"], ["--optimization_level", "2"]])
def test_levels_of_optimization_have_no_effect(words: list[str]) -> None:
    (note,) = read_arguments(["/m", *words]).notes
    assert note.startswith("--optimization-level 2 has no effect: ")


@pytest.mark.parametrize(
    "words", [["-O0"], ["-dp", "2"], ["-dp=2"], ["-cc.mode=3"], ["--compilation_config.mode", "3"]]
)
def test_short_and_dotted_flags_are_refused(words: list[str]) -> None:
    with pytest.raises(ValueError, match=r"optimization-level 0|data-parallel-size 2|compilation-config\.mode is not"):
        read_arguments(["/m", *words])


def test_short_flags_are_passed_on_by_their_long_names() -> None:
    arguments = read_arguments(["/m", "-q", "fp8", "-n=1", "-r", "0", "-ep"])
    assert arguments.engine == engine(
        "--model=/m",
        "--quantization",
        "fp8",
        "--nnodes=1",
        "--node-rank",
        "0",
        "--enable-expert-parallel",
    )


def test_fields_of_json_cannot_be_given_one_by_one() -> None:
    with pytest.raises(ValueError, match="write --speculative-config and its fields as JSON"):
        read_arguments(["/m", "--speculative-config.method", "ngram"])


def test_unknown_flags_get_a_suggestion() -> None:
    with pytest.raises(ValueError, match=r"unknown flag --max-model-length; did you mean --max-model-len\?"):
        read_arguments(["/m", "--max-model-length", "5"])


def test_a_file_of_vllm_is_read(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("enable-chunked-prefill: true\ntrust-remote-code: false\nmax-num-seqs: 8\n")
    arguments = read_arguments(["/m", f"--config={path}"])
    assert arguments.engine == engine("--model=/m", "--max-num-seqs=8")
    assert len(arguments.notes) == 2
