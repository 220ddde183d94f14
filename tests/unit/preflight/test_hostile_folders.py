"""A model's folder that was made to harm ends the start in time, with one sentence that names the file or the field."""

import json
import os
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from proa_engine.config import EngineConfig
from proa_engine.models import read_config
from proa_engine.models.quantization.formats import Quantization, Rule
from proa_engine.preflight import check_start, patterns
from support import shape_models
from support.thorough import seeds
from support.tiny_models import make_tiny_model

pytestmark = pytest.mark.timeout(120)
SLOW_PATTERN = r"re:(([a-z0-9._]+)+)+!$"
ODD_VALUES: list[Any] = [
    *(float("nan"), float("inf"), -1, 0, 1e308, -0.5, 2**70, 10**9, "x", "", [], [1], ["x"], {}, {"a": 1}),
    *(True, False, None, [None], [[]], {"__float__": "x"}, {"__float__": None}),
]
SHAPES = [shape for name, shape in vars(shape_models).items() if name.isupper() and "architectures" in str(shape)]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "good")


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return shutil.copytree(good, tmp_path / "model")


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError, match=r".") as raised:
        check_start(EngineConfig(model=str(folder)))
    return str(raised.value)


def configure(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_header(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    change(header)
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])


@pytest.mark.parametrize("kind", ["device", "pipe", "folder"])
@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "generation_config.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
        "model.safetensors",
        "model.safetensors.index.json",
    ],
)
def test_what_is_not_a_file_is_named_and_not_read(name: str, kind: str, folder: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    if kind == "device":
        (folder / name).symlink_to("/dev/zero")
    elif kind == "pipe":
        os.mkfifo(folder / name)
    else:
        (folder / name).mkdir()

    assert f"{name} is a {kind}" in refusal(folder).replace("device, a pipe or a socket", kind)


@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"])
def test_a_file_is_read_no_further_than_its_limit(name: str, folder: Path) -> None:
    with (folder / name).open("wb") as file:
        file.truncate(1 << 40)

    assert re.search(rf"{name} is too large: it has more than \d+ MiB", refusal(folder))


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"rms_norm_eps": float("nan")},
            "rms_norm_eps in config.json must be a finite number of at least zero, got nan",
        ),
        ({"rms_norm_eps": float("inf")}, "rms_norm_eps in config.json must be a finite number of at least zero"),
        ({"rms_norm_eps": -1e-6}, "rms_norm_eps in config.json must be a finite number of at least zero"),
        ({"rms_norm_eps": True}, "rms_norm_eps in config.json must be a number, got True"),
        ({"rope_theta": 0}, "rope_theta in config.json must be a finite number above zero, got 0"),
        (
            {"rope_parameters": {"rope_type": "linear", "factor": -2.0}},
            "factor in config.json must be a finite number above",
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_theta": float("inf")}}},
            "rope_theta in config.json must be a f",
        ),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0, float("nan")]}},
            "long_factor in config.json must",
        ),
        ({"logits_scaling": 0}, "logits_scaling in config.json must be a finite number above zero"),
        (
            {"hidden_size": 2**70},
            "hidden_size in config.json must be a whole number above zero, got 1180591620717411303",
        ),
        ({"hidden_size": [64]}, "hidden_size in config.json must be a whole number above zero, got [64]"),
        ({"num_key_value_heads": [-1]}, "num_key_value_heads in config.json must be a whole number above zero, got -1"),
        (
            {"num_hidden_layers": None, "num_layers": 10**9},
            "num_hidden_layers in config.json is 1000000000; supported: at most 10000",
        ),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers in config.json is 1000000000; supported: at most 10000"),
        ({"sliding_window": -5}, "sliding_window in config.json must be a whole number of at least zero, got -5"),
        ({"x": {"__float__": None}}, "config.json is not valid JSON: could not convert string to float"),
        ({"x": json.loads("[" * 150 + "]" * 150)}, "config.json nests more than 100 deep"),
        ({"architectures": ["A\nB"]}, "architecture A B is not supported"),
        (
            {"quantization_config": {"quant_method": "fp8", "modules_to_not_convert": ["re:" + "(" * 5000]}},
            "quantization_config has a pattern that cannot be read: '((((",
        ),
    ],
)
def test_a_value_that_no_model_has_is_refused_by_the_name_of_its_field(
    fields: dict[str, Any], sentence: str, folder: Path
) -> None:
    configure(folder, **fields)

    assert sentence in refusal(folder)


def test_a_sentence_has_one_line_and_no_megabytes(folder: Path) -> None:
    configure(folder, architectures=["Long\n" * 1_000_000])

    text = refusal(folder)
    assert len(text) <= 1000
    assert "\n" not in text


def test_a_pattern_that_does_not_end_ends_the_start(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patterns, "SECONDS", 1.0)
    configure(folder, quantization_config={"quant_method": "fp8", "modules_to_not_convert": ["lm_head", SLOW_PATTERN]})

    text = refusal(folder)
    assert "quantization_config in config.json: matching its patterns with the names of " in text
    assert text.endswith(f"takes more than 1 s; the pattern that ran: {SLOW_PATTERN.removeprefix('re:')}")


def test_patterns_of_large_models_are_matched_in_time() -> None:
    names = [f"model.layers.{layer}.mlp.experts.{expert}.up_proj" for layer in range(60) for expert in range(256)]
    rule = Rule(("lm_head", r"re:^(?!.*experts).*$", r"re:.*layers\.(0|1|2)\..*"), None)

    patterns.check_patterns(Quantization(None, (rule,)), names)


def set_entry(name: str, **fields: Any) -> Callable[[dict[str, Any]], object]:
    return lambda header: header[name].update(fields)


NORM, INNER_NORM = "model.norm.weight", "model.layers.0.input_layernorm.weight"


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (set_entry(INNER_NORM, data_offsets=[0, 256]), "begins at byte .* of the data, but .* ends at"),
        (set_entry(NORM, data_offsets=[-256, 0]), "its header is invalid: Expected `int` >= 0"),
        (set_entry(INNER_NORM, data_offsets=[256, 0]), "has -256 bytes, which are not those of"),
        (set_entry(NORM, shape=[-8, -8]), "its header is invalid: Expected `int` >= 0"),
        (set_entry(NORM, shape=[2**70]), "its header is invalid: "),
        (set_entry(NORM, shape=[2] * 1000), "its header is invalid: Expected `array` of length <= 16"),
        (
            lambda header: header.update({"a." * 1000: header[NORM]}),
            "its header is invalid: Expected `str` of length <=",
        ),
        (lambda header: header.update(second=header[NORM]), "begins at byte .* of the data, but .* ends at"),
        (lambda header: header.pop("model.layers.0.mlp.up_proj.weight"), "begins at byte .* of the data, but .* ends"),
        (lambda header: header.update({NORM: [[[]] * 100] * 100}), "its header is invalid: "),
    ],
)
def test_a_header_whose_tensors_cannot_be_those_of_the_file_is_refused(
    change: Callable[[dict[str, Any]], object], sentence: str, folder: Path
) -> None:
    edit_header(folder / "model.safetensors", change)

    assert re.search(f"model.safetensors is not a readable safetensors file: .*{sentence}", refusal(folder))


@pytest.mark.parametrize("length", [0, 2**60, 2**64 - 1, 10**8])
def test_a_length_of_a_header_beyond_the_file_is_refused(length: int, folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + path.read_bytes()[8:])

    assert "its first bytes are not the length of a header" in refusal(folder)


def places(value: Any, above: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the keys that lead to each value within a value."""
    keys = value if isinstance(value, dict) else range(min(len(value), 4)) if isinstance(value, list) else ()
    for key in keys:
        yield (*above, key)
        yield from places(value[key], (*above, key))


def spoil(value: Any, rng: random.Random) -> str:
    """Replace or remove one of the values within `value`, and return what was done."""
    place = rng.choice(list(places(value)))
    for key in place[:-1]:
        value = value[key]
    if rng.random() < 0.1:
        del value[place[-1]]
        return f"{place} removed"
    value[place[-1]] = json.loads(json.dumps(rng.choice(ODD_VALUES)))
    return f"{place} = {value[place[-1]]!r}"


def served_or_refused(attempt: Callable[[], object], what: str) -> None:
    try:
        attempt()
    except ValueError:
        pass
    except BaseException as error:
        raise AssertionError(what) from error


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_random_values_in_configurations_are_served_or_refused(seed: int, folder: Path) -> None:
    rng = random.Random(seed)
    for _ in range(20):
        fields = json.loads(json.dumps(rng.choice(SHAPES)))
        what = spoil(fields, rng)
        (folder / "config.json").write_text(json.dumps(fields))
        served_or_refused(lambda: read_config.from_folder(folder), f"{fields['architectures']} {what}")


@pytest.mark.parametrize("seed", seeds(6, 60))
def test_random_values_in_files_are_served_or_refused(seed: int, good: Path, folder: Path) -> None:
    rng = random.Random(seed)
    for _ in range(10):
        name = rng.choice([each.name for each in good.iterdir() if each.suffix in (".json", ".safetensors")])
        original, path = (good / name).read_bytes(), folder / name
        what = name
        if rng.random() < 0.3:
            data = bytearray(original)
            for _ in range(3):
                data[rng.randrange(min(len(data), 2000))] = rng.randrange(256)
            path.write_bytes(data)
        elif path.suffix == ".safetensors":
            edit_header(path, lambda header: spoil(header, rng))
        else:
            value = json.loads(original)
            what += f" {spoil(value, rng)}"
            path.write_text(json.dumps(value))
        served_or_refused(lambda: check_start(EngineConfig(model=str(folder))), f"seed {seed}: {what}")
        path.write_bytes(original)
