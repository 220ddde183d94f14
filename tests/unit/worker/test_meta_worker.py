"""What is rehearsed of a model before its weights are there."""

from dataclasses import replace
from pathlib import Path

from proa_engine.models.config import ModelConfig
from proa_engine.worker.meta_worker import one_of_each_kind
from support.tiny_models import make_tiny_model


def test_a_model_is_rehearsed_by_its_first_layer_and_one_of_each_kind_after_it(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_model(tmp_path, "llama"))
    config = replace(config, num_layers=6, layer_windows=(8, None, 8, None, 8, None))
    rehearsed = one_of_each_kind(config)
    assert rehearsed.layer_windows == (8, 8, None)
    assert rehearsed.num_layers == 3
