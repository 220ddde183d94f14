"""What is wrong with the modules of sentence-transformers is one sentence that names the file."""

import json
from pathlib import Path

import pytest

from proa_engine.models.pooling_config import read_embedding_modules

MODULES = [{"idx": 0, "type": "a.Transformer", "path": ""}, {"idx": 1, "type": "a.Pooling", "path": "1_Pooling"}]


@pytest.mark.parametrize(
    ("modules", "sentence"),
    [
        ("{", r"modules\.json is not a list of modules \(JSONDecodeError: "),
        ('{"idx": 0}', r"modules\.json is not a list of modules \(TypeError: "),
        (json.dumps([*MODULES[:1], {"idx": 1, "type": "a.Pooling"}]), r"is not a list of modules \(KeyError: 'path'\)"),
        (json.dumps(MODULES), "1_Pooling, a module of modules.json, has no config.json; was it copied or downloaded?"),
    ],
)
def test_a_bad_list_of_modules_is_named(modules: str, sentence: str, tmp_path: Path) -> None:
    (tmp_path / "modules.json").write_text(modules)

    with pytest.raises(ValueError, match=sentence):
        read_embedding_modules(tmp_path)
