"""The layers of a model whose kernels are compiled before its weights are loaded."""

from dataclasses import replace
from pathlib import Path

from proa_engine.models.config import ModelConfig
from proa_engine.worker.meta_worker import with_one_layer_of_each_kind
from support.tiny_models import make_tiny_model


def test_the_first_layer_and_one_of_each_kind_after_it_are_kept(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_model(tmp_path, "llama"))
    config = replace(config, num_layers=6, layer_windows=(8, None, 8, None, 8, None))
    reduced = with_one_layer_of_each_kind(config)
    assert reduced.layer_windows == (8, 8, None)
    assert reduced.num_layers == 3
