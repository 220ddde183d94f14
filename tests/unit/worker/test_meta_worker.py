"""The layers of a model whose kernels are compiled before its weights are loaded."""

from pathlib import Path

from proa_engine.models.config import ModelConfig
from proa_engine.worker.meta_worker import with_one_layer_of_each_kind
from support.tiny_models import make_tiny_model


def test_the_first_layer_and_one_of_each_kind_after_it_are_kept(tmp_path: Path) -> None:
    config = ModelConfig.from_folder(make_tiny_model(tmp_path, "olmo3", num_hidden_layers=8, sliding_window=8))
    window, full = config.layers[0], config.layers[3]
    assert window != full
    assert config.layers == (window, window, window, full) * 2
    assert with_one_layer_of_each_kind(config).layers == (window, window, full)
