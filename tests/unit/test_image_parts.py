"""Limits of images, by configuration and model."""

from dataclasses import replace
from typing import Any

import pytest

from proa.contract import ImageInput
from proa_engine.config import EngineConfig
from proa_engine.engine_parts import max_image_tokens
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.models.image_config import ImageConfig
from proa_engine.option_groups import ImageOptions

INPUT = ImageInput(token_id=9, token="<image>", placeholder="<image>", unit=32, side=512, resample=3)
IMAGES = ImageConfig(input=INPUT, embedding_width=8)
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


@pytest.mark.parametrize(
    ("fields", "num_tokens"),
    [
        ({"max_num_batched_tokens": 512}, 512 - 9),
        ({"max_num_batched_tokens": 512, "speculative_config": DRAFTS}, 512 - 9 * 4),
        ({"max_num_batched_tokens": 512, "encoder_cache_size": 300}, 300),
        ({"max_num_batched_tokens": 5}, 1),
    ],
)
def test_a_step_of_a_whole_image_also_has_a_token_of_every_other_request(
    fields: dict[str, Any], num_tokens: int
) -> None:
    config = EngineConfig.from_options(model="m", max_num_seqs=10, **fields)
    assert max_image_tokens(config, replace(IMAGES, attends_within=True), max_num_seqs=10) == num_tokens


def test_images_in_chunks_may_be_as_large_as_the_encoder_cache() -> None:
    config = EngineConfig(model="m", max_num_batched_tokens=16)
    assert max_image_tokens(config, IMAGES, max_num_seqs=10) == 256
    assert (
        max_image_tokens(replace(config, images=ImageOptions(encoder_cache_size=100)), IMAGES, max_num_seqs=10) == 100
    )


def test_an_engine_without_images_takes_none() -> None:
    assert max_image_tokens(EngineConfig(model="m"), None, max_num_seqs=10) == 0
