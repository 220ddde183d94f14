"""Qwen3-ASR's checkpoints as Qwen published them, and as `transformers` saves them, are the same model."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import AudioReader
from proa_engine.models.loader import load_model
from support.audio_prompt_models import AUDIO_TOKEN, as_released, make_qwen3_asr
from support.tiny_models import EOS_TOKEN_ID

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    parent = tmp_path_factory.mktemp("qwen3_asr")
    return as_released(make_qwen3_asr(parent / "transformers"), parent / "released")


def parameters(folder: Path, *, language_model_only: bool = False) -> list[torch.Tensor]:
    """Of the decoder, then of the encoder if it has one; without the axes of positions, which are of images."""
    config, context = read_config.from_folder(folder, language_model_only=language_model_only), ParallelContext()
    model = load_model(folder, config, dtype=torch.float32, device=CPU, parallel=context, report=lambda _: None)
    encoder = [*model.audio_encoder.parameters()] if config.audios and isinstance(model, AudioReader) else []
    weights = [each for each in (*model.parameters(), *encoder) if each.is_floating_point()]
    return [each.to_dense() if each.is_mkldnn else each for each in weights]


def test_a_published_checkpoint_has_the_weights_of_the_one_of_transformers(folder: Path) -> None:
    found, expected = parameters(folder), parameters(folder.parent / "transformers")
    assert all(map(torch.equal, found, expected))
    assert len(found) == len(expected) > len(parameters(folder, language_model_only=True))


def test_a_published_configuration_is_read_as_the_one_of_transformers(folder: Path) -> None:
    config, other = read_config.from_folder(folder), read_config.from_folder(folder.parent / "transformers")
    assert config.audios is not None
    assert other.audios is not None
    asr, other_asr = config.audios.input.asr, other.audios.input.asr
    assert asr is not None
    assert other_asr is not None
    assert (asr.marker, asr.languages) == ("<asr_text>", {"zh": "Chinese", "en": "English"})  # those that the file has
    assert len(other_asr.languages) == 30
    assert other.audios == replace(config.audios, input=replace(config.audios.input, asr=other_asr))
    assert config.audios.input.token_id == AUDIO_TOKEN
    assert config.eos_token_ids == (EOS_TOKEN_ID,)
    assert config.torch_dtype == torch.float32
    assert config.tie_word_embeddings


def test_a_forced_aligner_is_refused_by_name(folder: Path) -> None:
    with pytest.raises(ValueError, match="classify_num 5000 is not supported"):
        read_config.from_folder(folder, overrides={"thinker_config": {"classify_num": 5000}})
