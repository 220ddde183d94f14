"""How Whisper's files are read, what it cannot do, and its encoder against `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

from proa_engine.config import EngineConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory import auto_config
from proa_engine.models import read_config
from proa_engine.models.base import AudioReader
from proa_engine.models.config import ModelConfig, at_stage
from proa_engine.models.loader import load_model
from support.tiny_models import EOS_TOKEN_ID
from support.whisper_models import MAX_TARGET_POSITIONS, NUM_POSITIONS, RATE, TOKENS, make_whisper, tone

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_whisper(tmp_path_factory.mktemp("whisper"))


def changed(folder: Path, copy: Path, file: str, **fields: object) -> Path:
    """A copy of the folder's JSON files with other fields of one; None removes a field."""
    copy.mkdir()
    for path in folder.glob("*.json"):
        content = json.loads(path.read_text())
        if path.name == file:
            content = {name: value for name, value in {**content, **fields}.items() if value is not None}
        (copy / path.name).write_text(json.dumps(content))
    return copy


def test_the_decoder_is_read_by_its_own_fields(folder: Path) -> None:
    config = read_config.from_folder(folder)
    assert (len(config.layers), config.hidden_size) == (3, 64)
    assert config.max_position_embeddings == MAX_TARGET_POSITIONS
    assert config.eos_token_ids == (EOS_TOKEN_ID,)


def test_how_audio_is_read_comes_from_three_files(folder: Path) -> None:
    audios = read_config.from_folder(folder).audios
    assert audios is not None
    input = audios.input
    assert (input.sampling_rate, input.pad_to, input.max_samples, input.max_tokens) == (RATE, RATE, RATE, NUM_POSITIONS)
    prompts = input.whisper
    assert prompts is not None
    assert prompts.languages == {"en": TOKENS["en"], "de": TOKENS["de"]}
    assert prompts.tasks == {"transcribe": TOKENS["transcribe"], "translate": TOKENS["translate"]}
    assert prompts.decoder_start_token_id == TOKENS["startoftranscript"]
    assert prompts.prev_sot_token_id == TOKENS["startofprev"]
    assert prompts.no_speech_token_id == TOKENS["nospeech"]
    assert (prompts.no_timestamps_token_id, prompts.timestamp_begin_id) == (TOKENS["notimestamps"], TOKENS["0.00"])
    assert (prompts.suppress_tokens, prompts.begin_suppress_tokens) == ((1, 2), (220, EOS_TOKEN_ID))
    assert prompts.max_initial_timestamp_index == 25
    assert prompts.max_target_positions == MAX_TARGET_POSITIONS
    assert prompts.is_multilingual


def test_an_older_generation_config_leaves_fields_unset(folder: Path, tmp_path: Path) -> None:
    fields = ("lang_to_id", "task_to_id", "no_timestamps_token_id", "prev_sot_token_id", "is_multilingual")
    removed: dict[str, Any] = dict.fromkeys(fields)
    copy = changed(folder, tmp_path / "old", "generation_config.json", **removed)
    audios = read_config.from_folder(copy).audios
    assert audios is not None
    prompts = audios.input.whisper
    assert prompts is not None
    assert (prompts.languages, prompts.tasks, prompts.is_multilingual) == ({}, {}, False)
    assert (prompts.no_timestamps_token_id, prompts.timestamp_begin_id, prompts.no_speech_token_id) == (None,) * 3


@pytest.mark.parametrize(
    ("file", "fields", "message"),
    [
        ("preprocessor_config.json", {"dither": 0.1}, "dither 0.1 is not supported; supported: 0"),
        ("preprocessor_config.json", {"feature_size": 128}, "feature_size 128 is not supported; supported: 80"),
        ("preprocessor_config.json", {"chunk_length": 2}, "max_source_positions 50 is not supported; supported: 100"),
        ("config.json", {"activation_function": "relu"}, "activation_function relu is not supported; supported: gelu"),
        ("generation_config.json", {"alignment_heads": [[2, 4]]}, "head 4 of layer 2; 3 layers have 4"),
        ("config.json", {"encoder_layers": None}, "config.json lacks the field 'encoder_layers'"),
    ],
)
def test_what_is_not_supported_is_named(
    folder: Path, tmp_path: Path, file: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        read_config.from_folder(changed(folder, tmp_path / "other", file, **fields))


def resolved(folder: Path, **options: Any) -> ModelConfig:
    return auto_config.resolve_model_config(EngineConfig.from_options(model=str(folder), **options), folder, CPU)


def test_what_it_cannot_do_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="language_model_only is not supported for Whisper"):
        resolved(folder, language_model_only=True)
    with pytest.raises(ValueError, match="enable_prompt_embeds is not supported for Whisper"):
        resolved(folder, enable_prompt_embeds=True)
    with pytest.raises(ValueError, match=r"pipeline_parallel_size must be 1 for Whisper.* every stage would need"):
        at_stage(resolved(folder), 0, 2)


@pytest.mark.parametrize("seconds", [0.01, 0.5, 1.0])
def test_the_encoder_equals_that_of_transformers(folder: Path, seconds: float) -> None:
    config, samples = read_config.from_folder(folder), tone(1, seconds)
    context, report = ParallelContext(), list[str]().append
    loaded = load_model(folder, config, dtype=torch.float32, device=CPU, parallel=context, report=report)
    assert isinstance(loaded, AudioReader)
    features = WhisperFeatureExtractor.from_pretrained(folder)(samples, sampling_rate=RATE, return_tensors="pt")
    model = WhisperForConditionalGeneration.from_pretrained(folder, attn_implementation="eager").eval()
    with torch.inference_mode():
        expected = model.model.encoder(features.input_features).last_hidden_state[0]
        encoded = loaded.audio_encoder(torch.from_numpy(samples))
    assert encoded.shape == (NUM_POSITIONS, 64)
    assert torch.allclose(encoded, expected, atol=2e-5)
