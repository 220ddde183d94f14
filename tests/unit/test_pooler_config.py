"""PoolerConfig: what the user changes of a model's pooling."""

from typing import Any

import pytest

from proa.contract import PoolingTask
from proa_engine.json_configs import PoolerConfig
from proa_engine.models.pooling_config import PoolingConfig, PoolingKind, changed_pooling

EMBEDDINGS = PoolingConfig(
    kinds={PoolingTask.EMBED: PoolingKind.LAST, PoolingTask.TOKEN_EMBED: PoolingKind.ALL}, normalizes=True
)


def test_json_has_vllms_names() -> None:
    config = PoolerConfig.from_json(
        '{"seq_pooling_type": "MEAN", "enable_chunked_processing": true, "max_embed_len": 9}'
    )
    assert config == PoolerConfig(pooling_type="MEAN", enable_chunked_processing=True, max_embed_len=9)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"task": "plugin"}, "task must be one of embed, token_embed, classify, token_classify, got 'plugin'"),
        ({"pooling_type": "ALL"}, "pooling_type must be one of CLS, LAST, MEAN, got 'ALL'"),
        ({"pooling_type": "CLS", "seq_pooling_type": "CLS"}, "one of pooling_type and seq_pooling_type"),
        ({"use_activation": 1}, "use_activation must be true or false, got 1"),
        ({"max_embed_len": 10}, "enable_chunked_processing and max_embed_len need each other"),
        ({"enable_chunked_processing": True}, "enable_chunked_processing and max_embed_len need each other"),
        ({"enable_chunked_processing": True, "max_embed_len": 0}, "max_embed_len must be an integer above 0, got 0"),
        ({"step_tag_id": 3}, "pooler_config has no field 'step_tag_id'"),
    ],
)
def test_wrong_values_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoolerConfig.from_mapping(values)


def test_a_named_task_is_the_only_one() -> None:
    changed = changed_pooling(EMBEDDINGS, PoolerConfig(task="token_embed"))
    assert changed.kinds == {PoolingTask.TOKEN_EMBED: PoolingKind.ALL}


def test_a_task_that_the_model_does_not_have_is_refused() -> None:
    with pytest.raises(ValueError, match="does not have the task classify; its tasks: embed, token_embed"):
        changed_pooling(EMBEDDINGS, PoolerConfig(task="classify"))


def test_the_kind_of_pooling_and_the_activation_are_the_users() -> None:
    changed = changed_pooling(EMBEDDINGS, PoolerConfig(pooling_type="CLS", use_activation=False))
    assert changed.kinds == {PoolingTask.EMBED: PoolingKind.FIRST, PoolingTask.TOKEN_EMBED: PoolingKind.ALL}
    assert (changed.normalizes, changed.gives_probabilities) == (False, False)
