"""hf_overrides change config.json, generation_config and override_generation_config the sampling defaults."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from proa.tokenizer_files import sampling_defaults
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import EngineConfig
from proa_engine.memory.auto_config import resolve_model_config
from proa_engine.models.generation_config import read_prompt_files
from proa_engine.models.read_config import from_folder, of_engine
from proa_engine.preflight import check_start
from proa_engine.sources.folders import read_config


def folder_with(folder: Path, **fields: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_overrides_are_merged_field_by_field(tmp_path: Path) -> None:
    inner = {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}, "num_hidden_layers": 2}
    folder = folder_with(tmp_path, text_config=inner, max_position_embeddings=64, sliding_window=8)
    overrides = {
        "text_config": {"rope_parameters": {"rope_type": "yarn", "factor": 4.0}},
        "max_position_embeddings": 256,
        "sliding_window": None,
    }
    assert read_config(folder, overrides) == {
        "text_config": {
            "rope_parameters": {"rope_theta": 5e5, "rope_type": "yarn", "factor": 4.0},
            "num_hidden_layers": 2,
        },
        "max_position_embeddings": 256,
    }


@pytest.mark.parametrize("name", ["rope_scaling", "rope_theta"])
def test_older_names_of_fields_that_are_not_read_are_refused(name: str, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, rope_parameters={"rope_theta": 1e4})
    with pytest.raises(ValueError, match=f"hf_overrides: .* change those in place of {name}"):
        read_config(folder, {name: 1})


def test_a_value_of_a_wrong_type_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"max_position_embeddings in config\.json must be a whole number"):
        read_config(folder_with(tmp_path), {"max_position_embeddings": "64"})


def test_an_engine_has_the_overridden_model() -> None:
    config = EngineConfig(
        model="builtin",
        max_model_len=8192,
        hf_overrides={"max_position_embeddings": 8192, "rope_parameters": {"rope_type": "linear", "factor": 4.0}},
    )
    check_start(config)
    model = resolve_model_config(config, builtin_model_folder(), torch.device("cpu"))
    assert model.max_position_embeddings == 8192
    rope = model.layers[0].attention.rope  # type: ignore[attr-defined]
    assert (rope.type, rope.factor) == ("linear", 4.0)
    plain = from_folder(builtin_model_folder())
    assert plain.layers[0].attention.rope.theta == rope.theta  # type: ignore[attr-defined]


def test_ranks_on_other_machines_get_the_overrides() -> None:
    config = EngineConfig(model="m", hf_overrides={"rope_parameters": {"factor": 2.0}})
    assert msgspec.json.decode(msgspec.json.encode(config), type=EngineConfig) == config


def defaults(config: EngineConfig, tokenizer_folder: Path) -> dict[str, Any]:
    return sampling_defaults(read_prompt_files(config, tokenizer_folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model whose files have sampling parameters."""
    folder = folder_with(tmp_path / "model")
    (folder / "tokenizer.json").write_text("{}")
    (folder / "generation_config.json").write_text('{"temperature": 0.6, "top_p": 0.9, "eos_token_id": 2}')
    return folder


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, {"temperature": 0.6, "top_p": 0.9}),
        ({"generation_config": "vllm"}, {}),
        (
            {"override_generation_config": {"temperature": 0.1, "top_k": 5}},
            {"temperature": 0.1, "top_p": 0.9, "top_k": 5},
        ),
        ({"generation_config": "vllm", "override_generation_config": {"min_p": 0.1}}, {"min_p": 0.1}),
    ],
)
def test_sampling_defaults_are_what_the_options_say(
    options: dict[str, Any], expected: dict[str, Any], folder: Path
) -> None:
    assert defaults(EngineConfig.from_options(model=str(folder), **options), folder) == expected


def test_another_folder_has_the_sampling_defaults_and_end_tokens(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    other.mkdir()
    (other / "generation_config.json").write_text('{"top_k": 7, "eos_token_id": [2, 3]}')
    assert defaults(EngineConfig(model=str(folder), generation_config=str(other)), folder) == {"top_k": 7}
    config = EngineConfig(model="builtin", generation_config=str(other))
    assert of_engine(config, builtin_model_folder(), language_model_only=False).eos_token_ids == (2, 3)


def test_a_tokenizer_of_its_own_keeps_the_defaults_of_the_model(folder: Path, tmp_path: Path) -> None:
    tokenizer = tmp_path / "tokenizer"
    tokenizer.mkdir()
    (tokenizer / "tokenizer.json").write_text("{}")
    (tokenizer / "generation_config.json").write_text('{"top_k": 7}')
    config = EngineConfig(model=str(folder), tokenizer=str(tokenizer))
    assert defaults(config, tokenizer) == {"temperature": 0.6, "top_p": 0.9}


def test_a_folder_without_the_file_is_refused_before_the_model_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"generation_config .* is neither auto nor vllm nor a folder"):
        check_start(EngineConfig(model="builtin", generation_config=str(tmp_path)))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_new_tokens": 5}, "override_generation_config cannot change max_new_tokens, only temperature, top_p, "),
        ({"top_p": "high"}, "top_p of override_generation_config must be a number, got 'high'"),
    ],
)
def test_what_is_no_sampling_default_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", override_generation_config=values)
