"""The cut of a model's layers into pipeline stages."""

import random
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.config import ModelConfig, at_stage
from proa_engine.models.loader import load_model
from proa_engine.models.stages import WHOLE, Stage, cut
from support.renamed_models import make_renamed_model
from support.tiny_models import VOCAB_SIZE, make_tiny_model


def ranges(stages: list[Stage]) -> list[tuple[int, int]]:
    return [(stage.first, stage.end or 0) for stage in stages]


def test_one_stage_has_all_layers() -> None:
    assert cut([1, 1, 1], 1) == [Stage(0, 1, 0, 3)]
    assert list(WHOLE.own("abc")) == ["a", "b", "c"]


def test_equal_layers_are_divided_evenly() -> None:
    assert ranges(cut([5] * 8, 2)) == [(0, 4), (4, 8)]
    assert sorted(end - first for first, end in ranges(cut([5] * 8, 3))) == [2, 3, 3]


def test_the_head_takes_the_place_of_layers_on_the_first_stage() -> None:
    assert ranges(cut([10] * 8, 2, first_cost=40)) == [(0, 2), (2, 8)]


def test_layers_that_must_be_on_the_first_stage_are() -> None:
    assert ranges(cut([10] * 8, 2, first_cost=1000, num_first=3)) == [(0, 3), (3, 8)]


@pytest.mark.parametrize("seed", range(20))
def test_no_cut_has_a_less_costly_stage(seed: int) -> None:
    rng = random.Random(seed)
    costs = [rng.randint(1, 30) for _ in range(rng.randint(4, 10))]
    num_stages, first_cost, num_first = rng.randint(1, 4), rng.choice([0, 20]), rng.randint(1, 2)
    if num_stages > len(costs) - num_first + 1:
        return

    def cost(bounds: tuple[int, ...]) -> int:
        parts = zip((0, *bounds), (*bounds, len(costs)), strict=True)
        return max(sum(costs[start:end]) + (first_cost if start == 0 else 0) for start, end in parts)

    stages = cut(costs, num_stages, first_cost=first_cost, num_first=num_first)
    assert [layer for stage in stages for layer in stage.own(range(len(costs)))] == list(range(len(costs)))
    assert all(stage.own(costs) for stage in stages)
    all_bounds = combinations(range(num_first, len(costs)), num_stages - 1)
    assert cost(tuple(stage.first for stage in stages[1:])) == min(map(cost, all_bounds))


def test_more_stages_than_layers_are_refused() -> None:
    assert len(cut([1, 1, 1], 3)) == 3
    with pytest.raises(ValueError, match="pipeline_parallel_size 4 is more than the 3 parts"):
        cut([1, 1, 1], 4)
    with pytest.raises(ValueError, match="pipeline_parallel_size 3 is more than the 2 parts"):
        cut([1, 1, 1], 3, num_first=2)


def test_a_layer_costs_its_parameters_and_the_first_stage_has_the_head(tmp_path: Path) -> None:
    config = read_config.from_folder(make_tiny_model(tmp_path, num_hidden_layers=12, vocab_size=1600))
    head, layer = 1600 * 64, config.layers[0].num_parameters(64)
    assert 3 * layer < head < 4 * layer
    assert ranges([at_stage(config, index, 2).stage for index in range(2)]) == [(0, 4), (4, 12)]
    assert len(at_stage(config, 1, 2).own_layers) == 8
    assert at_stage(config, 0, 1) is config


@pytest.mark.parametrize("architecture", ["ChatGLMForConditionalGeneration", "ExaoneForCausalLM"])
def test_a_stage_leaves_the_layers_of_others_by_the_names_of_the_checkpoint(architecture: str, tmp_path: Path) -> None:
    folder, _ = make_renamed_model(tmp_path, architecture)
    config, cpu = read_config.from_folder(folder), torch.device("cpu")
    stages = [at_stage(config, index, 2) for index in range(2)]

    def load(each: ModelConfig) -> set[tuple[int, ...]]:
        model = load_model(
            folder, each, dtype=torch.float32, device=cpu, parallel=ParallelContext(), report=lambda line: None
        )
        return {tuple(part.shape) for part in model.parameters()}

    embedding = (VOCAB_SIZE, 64)
    assert [embedding in load(each) for each in (config, *stages)] == [True, True, False]


@pytest.mark.parametrize(
    ("model_type", "fields", "reason"),
    [
        ("gemma4_text", {"hidden_size_per_layer_input": 8}, "each layer has an input that is made of the token"),
        (
            "gemma4_text",
            {
                "hidden_size_per_layer_input": 0,
                "num_kv_shared_layers": 2,
                "layer_types": ["sliding_attention", "full_attention"] * 3,
            },
            "layers read the caches of earlier ones",
        ),
        ("gpt_neox", {}, "transformers runs it"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(
    model_type: str, fields: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    config = read_config.from_folder(make_tiny_model(tmp_path, model_type, num_hidden_layers=6, **fields))
    with pytest.raises(ValueError, match=f"pipeline_parallel_size must be 1 for .*: {reason}"):
        at_stage(config, 0, 2)
