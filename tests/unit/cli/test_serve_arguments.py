"""The arguments of `proa serve`: which program gets them."""

import pickle
from pathlib import Path

import pytest

from proa_cli.arguments import Arguments, read_arguments
from proa_cli.serve import commands_of, warnings_of
from support import variables_page
from support.serve_arguments import engine, gateway


def test_each_program_gets_its_flags() -> None:
    arguments = read_arguments(["/m", "-tp", "2", "--max-model-len=256", "--routing", "session", "--port=8001"])
    assert arguments == Arguments(
        engine("--model=/m", "--tensor-parallel-size", "2", "--max-model-len=256"),
        gateway("--routing", "session", "--port=8001"),
    )
    assert (arguments.model, arguments.url) == ("/m", "http://127.0.0.1:8001")
    assert (arguments.engine.drain_timeout, arguments.gateway.deadlines.shutdown) == (60.0, 30.0)


@pytest.mark.parametrize("flag", ["--no-enable-prefix-caching", "--no_enable_prefix_caching"])
def test_a_flag_can_be_negated_and_have_underscores(flag: str) -> None:
    assert read_arguments(["/m", flag]).engine == engine("--model=/m", "--no-enable-prefix-caching")


def test_flags_of_both_programs_go_where_they_are_meant() -> None:
    arguments = read_arguments(
        [
            "/m",
            "--host=::1",
            "--drain-timeout=7",
            "--enable-lora",
            "--lora-modules",
            "a=/a",
            "b=/b",
            "--max-waiting-requests=9",
        ]
    )
    own = ("--enable-lora", "--lora-modules", "a=/a", "b=/b")
    assert arguments.engine == engine("--model=/m", "--drain-timeout=7", *own)
    assert arguments.gateway == gateway("--host=::1", "--drain-timeout=7", "--max-waiting-requests=9")
    assert arguments.url == "http://[::1]:8000"
    assert (arguments.engine.drain_timeout, arguments.gateway.deadlines.shutdown) == (7.0, 7.0)


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8000"), ("::", "http://[::1]:8000"), ("localhost", "http://localhost:8000")],
)
def test_the_url_is_one_on_which_the_gateway_listens(host: str, url: str) -> None:
    arguments = read_arguments(["/m", f"--host={host}"])
    assert (arguments.gateway.host, arguments.url) == (host, url)


def test_the_builtin_model_has_its_adapters() -> None:
    assert read_arguments(["builtin"]).engine == engine(
        "--model=builtin",
        "--enable-lora",
        "--lora-modules=sailor=builtin:sailor",
        "--lora-modules=butler=builtin:butler",
    )


def test_the_builtin_model_can_be_without_its_adapters() -> None:
    assert read_arguments(["builtin", "--no-enable-lora"]).engine == engine("--model=builtin", "--no-enable-lora")


@pytest.mark.parametrize(
    ("value", "flag"), [("false", "--enable-prefix-caching"), ("true", "--no-enable-prefix-caching")]
)
def test_a_negated_flag_of_a_file_is_negated_once(value: str, flag: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(f"no-enable-prefix-caching: {value}\n")
    assert read_arguments(["/m", f"--config={path}"]).engine == engine("--model=/m", flag)


def test_a_file_has_flags_that_the_command_line_overrides(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "max-model-len: 256\nmax_num_seqs: 8\nenforce-eager: true\nenable-prefix-caching: false\nport: 8002\n"
        "api-key: [one, two]\nspeculative-config: {method: ngram, num_speculative_tokens: 2}\n"
    )
    arguments = read_arguments(["/m", "--config", str(path), "--max-num-seqs=4"])
    assert arguments.engine == engine(
        "--model=/m",
        "--max-model-len=256",
        "--enforce-eager",
        "--no-enable-prefix-caching",
        '--speculative-config={"method": "ngram", "num_speculative_tokens": 2}',
        "--max-num-seqs=4",
    )
    assert arguments.gateway == gateway("--port=8002", "--api-key", "one", "two")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("- 1", "must be a mapping of flags to values"),
        ("a: [", "is not YAML"),
        ("prot: 1", "unknown flag --prot"),
        ("no-such: 1", "unknown flag --no-such;"),
        ("port:", "port of the file of --config has no value"),
        ("config: other.yaml", "names another file by config, which is not read"),
    ],
)
def test_a_wrong_file_is_refused(text: str, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ValueError, match=reason):
        read_arguments(["/m", f"--config={path}"])


def test_the_place_of_an_error_in_a_file_is_named_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 8000\napi-key: [sk-secret\n")
    with pytest.raises(ValueError, match="is not YAML") as caught:
        read_arguments(["/m", f"--config={path}"])
    assert str(caught.value).endswith(", line 3, column 1")
    assert "\n" not in str(caught.value)
    assert "sk-secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("words", "key"),
    [(["--api-key", "sk-1", "sk-2"], "sk-1"), (["--operator-key=sk-3"], "sk-3"), ([], "")],
)
def test_the_gateway_is_asked_with_a_key_of_its_flags(words: list[str], key: str) -> None:
    arguments = read_arguments(["/m", "--served-model-name", "a", "b", *words])
    assert (arguments.model, arguments.api_key) == ("a", key)
    assert "sk-" not in repr(read_arguments(["/m"], {"PROA_API_KEY": "sk-1"}))


@pytest.mark.parametrize("words", [["--api-key=sk-1"], ["--api-key", "sk-1"], []])
def test_keys_come_from_the_command_line_then_the_file_then_variables(words: list[str], tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("api-key: sk-1\noperator-key: sk-2\n")
    arguments = read_arguments(["/m", *words, f"--config={path}"], {"PROA_API_KEY": "sk-0"})
    assert arguments.gateway == gateway("--api-key=sk-1", "--operator-key=sk-2")
    assert "sk-" not in repr(arguments)


def test_keys_are_no_words_of_programs_which_all_users_can_read() -> None:
    arguments = read_arguments(["/m", "--api-key=sk-1", "--operator-key=sk-2"])
    commands = commands_of(arguments)
    assert not any("sk-" in word for _, words, _, _ in commands for word in words)
    assert [pickle.loads(given) for _, _, _, given in commands] == [arguments.engine, arguments.gateway]


@pytest.mark.parametrize("words", [["--api-key="], ["--api-key", "a\nb"], ["--api-key"]])
def test_a_key_that_cannot_be_one_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        read_arguments(["/m", *words])
    assert capsys.readouterr().err.startswith("proa serve: error: argument --api-key: ")


def test_lists_of_mappings_are_json(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("enable-lora: true\nlora-modules: [{name: a, path: /a}]\n")
    words = ["--enable-lora", "--lora-modules", '{"name": "a", "path": "/a"}']
    assert read_arguments(["/m", f"--config={path}"]).engine == engine("--model=/m", *words)


def test_a_file_of_comments_has_no_flags(tmp_path: Path) -> None:
    (file := tmp_path / "serve.yaml").write_text("# port: 8000\n")
    assert read_arguments(["/m", f"--config={file}"]) == read_arguments(["/m"])


def test_a_file_that_is_missing_is_named() -> None:
    with pytest.raises(ValueError, match=r"--config /missing.yaml: No such file or directory"):
        read_arguments(["/m", "--config", "/missing.yaml"])


def test_a_second_model_is_refused() -> None:
    with pytest.raises(ValueError, match="'b' is not a flag; only one model can be served"):
        read_arguments(["a", "b"])


def test_a_node_without_a_gateway_is_refused() -> None:
    nodes = ["--tensor-parallel-size=2", "--nnodes=2", "--master-addr=10.0.0.1"]
    assert read_arguments(["/m", *nodes]).engine == engine("--model=/m", *nodes)
    with pytest.raises(ValueError, match=r"run the other nodes \(--node-rank\) with `proa-engine serve`"):
        read_arguments(["/m", *nodes, "--node-rank=1"])


def test_variables_are_read_by_the_program_that_has_the_flag() -> None:
    environment = {
        "PATH": "/bin",
        "PROA_MODEL": "/m",
        "PROA_MAX_NUM_SEQS": "8",
        "PROA_PORT": "8003",
        "PROA_DRAIN_TIMEOUT": "7",
        "PROA_LORA_MODULES": "a=/a",
        "PROA_ENABLE_LORA": "1",
        "PROA_API_KEY": "sk-1",
        "PROA_DEPENDENT_LAUNCH": "0",
    }
    arguments = read_arguments(["--max-model-len=64"], environment)
    loras = ("--lora-modules=a=/a", "--enable-lora")
    assert arguments == Arguments(
        engine("--model=/m", "--max-model-len=64", "--max-num-seqs=8", "--drain-timeout=7", *loras),
        gateway("--port=8003", "--drain-timeout=7", "--api-key=sk-1"),
    )
    assert (arguments.model, arguments.url) == ("/m", "http://127.0.0.1:8003")
    assert (arguments.needs_key, arguments.api_key) == (True, "sk-1")


def test_the_command_line_and_the_file_come_before_variables(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("port: 8002\nmax-num-seqs: 8\n")
    environment = {"PROA_CONFIG": str(path), "PROA_PORT": "8003", "PROA_MAX_NUM_SEQS": "no", "PROA_MODEL": "/n"}
    arguments = read_arguments(["/m", "--max-num-seqs=4"], environment)
    assert arguments.url == "http://127.0.0.1:8002"
    assert arguments.engine == engine("--model=/m", "--max-num-seqs=4")


def test_the_builtin_model_has_the_adapters_of_the_environment() -> None:
    assert read_arguments(["builtin"], {"PROA_ENABLE_LORA": "false"}).engine == engine("--model=builtin")


@pytest.mark.parametrize(
    ("variable", "text", "reason"),
    [
        ("PROA_MAX_NUM_SEQS", "many", "the variable PROA_MAX_NUM_SEQS: .*'many'"),
        ("PROA_PORT", "70000", "the variable PROA_PORT must be at most 65535, got 70000"),
        ("PROA_TLS_CERT", "a.crt", "PROA_TLS_CERT is set, but --tls-cert is not a flag of `proa serve`"),
        ("PROA_CONFIG", "/missing.yaml", "--config /missing.yaml: No such file"),
    ],
)
def test_a_wrong_variable_is_refused(variable: str, text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        read_arguments(["/m"], {variable: text})


def test_variables_of_services_and_misspelled_ones_are_noted() -> None:
    environment = {"PROA_PORT": "tcp://10.0.0.1:80", "PROA_MAX_MODEL_LENGTH": "64", "PROA_SERVICE_HOST": "10.0.0.1"}
    arguments = read_arguments(["/m"], environment)
    assert arguments.url == "http://127.0.0.1:8000"
    assert [note.partition(" is ")[0] for note in arguments.notes] == ["PROA_MAX_MODEL_LENGTH", "PROA_PORT"]
    assert (arguments.engine, arguments.gateway) == (engine("--model=/m"), gateway())


@pytest.mark.parametrize(
    ("words", "environment", "warns"),
    [
        ([], {}, True),
        (["--host=::"], {}, True),
        (["--host=127.0.0.1"], {}, False),
        (["--api-key=sk-1"], {}, False),
        (["--operator-key=sk-1"], {}, False),
        (["--api-keys=/keys.json"], {}, False),
        ([], {"PROA_API_KEY": "sk-1"}, False),
        ([], {"PROA_HOST": "localhost"}, False),
    ],
)
def test_one_line_says_that_all_addresses_are_open_without_a_key(
    words: list[str], environment: dict[str, str], warns: bool
) -> None:
    arguments = read_arguments(["/m", *words], environment)
    warnings = list(warnings_of(arguments))
    assert [line.partition(" without")[0] for line in warnings] == ["listens on all addresses of this machine"] * warns
    assert not any("\n" in line for line in warnings)


def test_vllms_variable_of_a_key_is_noted_unless_there_is_a_key() -> None:
    environment = {"VLLM_API_KEY": "sk-1"}
    (note,) = read_arguments(["/m"], environment).notes
    assert note == "VLLM_API_KEY is ignored: the variable of an API key is PROA_API_KEY"
    assert not read_arguments(["/m", "--api-key=sk-2"], environment).notes


def test_the_page_lists_the_variables() -> None:
    assert variables_page.PAGE.read_text() == variables_page.page(), "run `make pages`"


def test_the_file_names_the_model_unless_the_command_line_does(tmp_path: Path) -> None:
    (file := tmp_path / "proa.yaml").write_text("model: /m\nmax-num-seqs: 4\n")
    environment = {"PROA_MODEL": "/other"}
    assert read_arguments([f"--config={file}"], environment).engine == engine("--model=/m", "--max-num-seqs=4")
    assert read_arguments(["/n", f"--config={file}"], environment).engine == engine("--model=/n", "--max-num-seqs=4")
