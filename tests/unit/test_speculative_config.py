"""speculative_config has vLLM's names; what is not supported is refused in a sentence."""

import json
from pathlib import Path
from typing import Any, Literal

import pytest

from proa_engine.config import EngineConfig
from proa_engine.core.speculation import WAYS
from proa_engine.json_configs import SAMPLE_METHODS, SpeculativeConfig
from proa_engine.models import read_config
from proa_engine.models.drafters.draft_number import with_draft_number
from proa_engine.models.drafters.load import find_drafter
from support.drafters import write_eagle3
from support.tiny_models import make_tiny_model

EAGLE3: dict[str, Any] = {"method": "eagle3", "model": "/drafter"}
SCHEDULE = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({}, "speculative_config must name method"),
        ({"method": "draft_model", "model": "m"}, "method draft_model is not supported: a drafter's layers read"),
        ({"method": "suffix"}, "method suffix is not supported: .*; supported: ngram, eagle3, mtp, dflash"),
        ({"method": "medusa", "model": "m"}, "method medusa is not supported: take an EAGLE-3 head"),
        ({"method": "guess"}, "method must be one of ngram, eagle3, mtp, dflash, dspark, got guess"),
        ({"method": "eagle3"}, "method eagle3 needs model, the folder or the hub id of the drafter"),
        ({"method": "dspark"}, "method dspark needs model, the folder or the hub id of the drafter"),
        ({"method": "ngram", "model": "m"}, "model has no effect with method ngram"),
        ({**EAGLE3, "revision": 3}, "revision must be a string, got 3"),
        ({**EAGLE3, "num_speculative_tokens": 0}, "num_speculative_tokens must be an integer from 1 to 32, got 0"),
        (
            {**EAGLE3, "num_speculative_tokens": True},
            "num_speculative_tokens must be an integer from 1",
        ),
        ({**EAGLE3, "draft_sample_method": "best"}, "draft_sample_method must be one of auto, greedy, probabilistic"),
        ({**EAGLE3, "rejection_sample_method": "synthetic"}, "rejection_sample_method 'synthetic' is not supported: a"),
        ({**EAGLE3, "parallel_drafting": True}, "parallel_drafting True is not supported: its method says"),
        ({**EAGLE3, "use_heterogeneous_vocab": True}, "use_heterogeneous_vocab True is not supported: the drafter has"),
        ({**EAGLE3, "speculative_token_tree": "[(0,)]"}, "speculative_token_tree .* is not supported: .* no tree"),
        ({**EAGLE3, SCHEDULE: []}, "num_speculative_tokens_per_batch_size must be a list of ranges"),
        ({**EAGLE3, SCHEDULE: [[1, 4]]}, r"must have ranges \[first, last, drafts\] of integers, got \[1, 4\]"),
        ({**EAGLE3, SCHEDULE: [[2, 4, 3]]}, "must begin with 1 request, got 2"),
        ({**EAGLE3, SCHEDULE: [[1, 4, 3], [4, 8, 2]]}, "must have ascending ranges that do not overlap"),
        ({**EAGLE3, SCHEDULE: [[1, 4, -1]]}, "must have at least 0 draft tokens, got -1"),
        ({**EAGLE3, "temperature": 1}, "speculative_config has no field 'temperature'; its fields are method, "),
    ],
)
def test_what_is_not_supported_is_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SpeculativeConfig.from_mapping(values)


def test_fields_of_vllm_without_effect_are_accepted() -> None:
    ignored = {"disable_padded_drafter_batch": True, "disable_eagle_block_drop": False, "parallel_drafting": False}
    config = SpeculativeConfig.from_mapping({**EAGLE3, **ignored, "rejection_sample_method": "standard"})
    assert config == SpeculativeConfig(method="eagle3", model="/drafter")
    assert config.max_drafts == 3


def test_a_schedule_is_read_by_the_first_number_of_each_range_and_limited_by_the_maximum() -> None:
    ranges = [[1, 16, 5], [32, 128, 2], [256, 4096, 0]]
    assert SpeculativeConfig.from_mapping({**EAGLE3, SCHEDULE: ranges}).schedule == ((1, 3), (32, 2), (256, 0))


def test_vllms_names_of_mtp_by_family_mean_mtp() -> None:
    assert SpeculativeConfig.from_mapping({"method": "glm4_moe_mtp"}) == SpeculativeConfig(method="mtp")


def test_every_sample_method_has_its_ways_to_draw() -> None:
    assert set(WAYS) == set(SAMPLE_METHODS)


def test_ranks_that_a_drafter_cannot_have_are_refused() -> None:
    one_rank = SpeculativeConfig.from_mapping({**EAGLE3, "draft_tensor_parallel_size": 1})
    EngineConfig.from_options(model="m", speculative_config=one_rank)
    with pytest.raises(ValueError, match=r"draft_tensor_parallel_size must be tensor_parallel_size \(2\)"):
        EngineConfig.from_options(model="m", speculative_config=one_rank, tensor_parallel_size=2)
    any_ranks = SpeculativeConfig.from_mapping(EAGLE3)
    with pytest.raises(ValueError, match="decode_context_parallel_size must be 1 with a drafter"):
        EngineConfig.from_options(
            model="m", speculative_config=any_ranks, tensor_parallel_size=2, decode_context_parallel_size=2
        )


@pytest.mark.parametrize(
    ("method", "block_size", "fields", "expected"),
    [
        ("dflash", 16, {}, 15),
        ("dspark", 7, {}, 7),
        ("dflash", 8, {"sample_from_anchor": True}, 8),
        ("dflash", 64, {}, 32),
        ("dspark", 7, {"chosen": 4}, 4),
    ],
)
def test_drafters_of_blocks_have_as_many_drafts_as_a_block_has_room_for(
    tmp_path: Path, method: Literal["dflash", "dspark"], block_size: int, fields: dict[str, Any], expected: int
) -> None:
    chosen = fields.pop("chosen", None)
    (tmp_path / "config.json").write_text(json.dumps({"dflash_config": {"block_size": block_size}} | fields))
    drafts = SpeculativeConfig(method=method, model=str(tmp_path), num_speculative_tokens=chosen)
    config = EngineConfig.from_options(model="m", speculative_config=drafts)
    assert with_draft_number(config).num_speculative_tokens == expected


def test_a_drafter_of_blocks_without_a_block_size_is_refused_and_others_keep_their_number(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    drafts = SpeculativeConfig(method="dflash", model=str(tmp_path))
    with pytest.raises(ValueError, match="lacks the field 'block_size'"):
        with_draft_number(EngineConfig.from_options(model="m", speculative_config=drafts))
    own = SpeculativeConfig(method="eagle3", model=str(tmp_path))
    for drafts in (own, SpeculativeConfig(method="mtp"), SpeculativeConfig(method="ngram")):
        config = EngineConfig.from_options(model="m", speculative_config=drafts)
        assert with_draft_number(config) == config
        assert config.num_speculative_tokens == 3


@pytest.mark.parametrize(
    ("method", "named", "chosen", "expected"),
    [
        ("eagle3", 5, None, 5),
        ("mtp", 2, None, 2),
        ("eagle3", 50, None, 32),
        ("eagle3", 5, 4, 4),
        ("dflash", 7, None, 7),
        ("dflash", 20, None, 15),  # a block of 16
    ],
)
def test_a_checkpoint_of_speculators_names_its_number_of_drafts(
    tmp_path: Path, method: Literal["eagle3", "mtp", "dflash"], named: int, chosen: int | None, expected: int
) -> None:
    ways = [{"proposal_type": "greedy", "speculative_tokens": named}, {"speculative_tokens": 9}]
    fields = {"block_size": 16, "speculators_config": {"proposal_methods": ways}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drafts = SpeculativeConfig(method=method, model=str(tmp_path), num_speculative_tokens=chosen)
    config = EngineConfig.from_options(model="m", speculative_config=drafts)
    assert with_draft_number(config).num_speculative_tokens == expected


@pytest.mark.parametrize("named", [0, "3", None, True])
def test_a_checkpoint_that_names_no_positive_number_of_drafts_is_refused(tmp_path: Path, named: object) -> None:
    fields = {"speculators_config": {"proposal_methods": [{"speculative_tokens": named}]}}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drafts = SpeculativeConfig(method="eagle3", model=str(tmp_path))
    with pytest.raises(
        ValueError, match=f"^speculative_config model {tmp_path}: speculative_tokens must be an integer"
    ):
        with_draft_number(EngineConfig.from_options(model="m", speculative_config=drafts))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"speculators_config": ["eagle3"]}, "speculators_config in config.json must be an object"),
        ({"dflash_config": 16}, "dflash_config in config.json must be an object"),
        ({"speculators_config": {"proposal_methods": {"greedy": 3}}}, "proposal_methods must be a list of objects"),
        ({"speculators_config": {"proposal_methods": ["greedy"]}}, "proposal_methods must be a list of objects"),
    ],
)
def test_a_drafters_config_in_another_shape_is_refused(tmp_path: Path, fields: dict[str, object], words: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps(fields))
    drafts = SpeculativeConfig(method="dflash", model=str(tmp_path))
    with pytest.raises(ValueError, match=f"^speculative_config model {tmp_path}: {words}"):
        with_draft_number(EngineConfig.from_options(model="m", speculative_config=drafts))


def test_the_built_in_drafter_names_four() -> None:
    drafts = SpeculativeConfig(method="eagle3", model="builtin")
    config = EngineConfig.from_options(model="builtin", speculative_config=drafts)
    assert with_draft_number(config).num_speculative_tokens == 4


def test_models_without_drafters_are_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path / "model")
    model = read_config.from_folder(folder)
    drafter = write_eagle3(tmp_path / "drafter", folder)
    config = EngineConfig.from_options(
        model=str(folder), speculative_config=SpeculativeConfig(method="eagle3", model=str(drafter))
    )
    assert find_drafter(config, model)
    adapted = read_config.from_folder(make_tiny_model(tmp_path / "adapted", "starcoder2"))
    with pytest.raises(ValueError, match="not supported for Starcoder2ForCausalLM, which transformers runs"):
        find_drafter(config, adapted)
    embedding = read_config.from_folder(folder, runner="pooling")
    with pytest.raises(ValueError, match="method eagle3 needs a model that generates tokens"):
        find_drafter(config, embedding)
