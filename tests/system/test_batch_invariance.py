"""A token's hidden state has the same bits alone, among many, in one prefill, in chunks and as a decode."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.base import CausalLM
from proa_engine.models.loader import load_model
from support.paged_model import CachedSequence, PagedModel
from support.tiny_models import VOCAB_SIZE, make_tiny_model

VARIANTS = {
    "llama, KV heads shared by two": ("llama", {}),
    "llama, no sharing, odd sizes": (
        "llama",
        {"num_attention_heads": 3, "num_key_value_heads": 3, "head_dim": 12, "hidden_size": 36},
    ),
    "qwen3, KV head shared by eight": ("qwen3", {"num_attention_heads": 8, "num_key_value_heads": 1}),
    "qwen3 moe": ("qwen3_moe", {}),
    "mistral, sliding window": ("mistral", {"sliding_window": 24}),
}


@pytest.fixture(params=list(VARIANTS.values()), ids=list(VARIANTS))
def model(request: pytest.FixtureRequest, tmp_path: Path) -> CausalLM:
    architecture, overrides = request.param
    folder = make_tiny_model(tmp_path, architecture, **overrides)
    return load_model(
        folder,
        read_config.from_folder(folder),
        dtype=torch.float32,
        device=torch.device("cpu"),
        parallel=ParallelContext(),
        report=lambda line: None,
    )


def random_tokens(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB_SIZE), k=length)


def paged(model: CausalLM, **options: Any) -> PagedModel:
    return PagedModel(model, **options)


def test_chunks_and_decodes_give_the_bits_of_one_prefill(model: CausalLM) -> None:
    tokens = random_tokens(301, seed=1)
    whole = paged(model).prefill(tokens)
    for chunk in (7, 64):
        assert torch.equal(paged(model, seed=chunk).prefill(tokens, chunk), whole), f"chunks of {chunk}"
    sequence, batch = CachedSequence(tokens), paged(model)
    batch.step([(sequence, 120)])
    for position in range(120, 150):
        assert torch.equal(batch.step([(sequence, 1)])[0][0], whole[position])


def test_a_batch_of_64_gives_the_bits_of_each_alone(model: CausalLM) -> None:
    rng = random.Random(2)
    sequences = [CachedSequence(random_tokens(rng.choice([2, 5, 30, 130, 200]), seed=i)) for i in range(64)]
    batch = paged(model, num_blocks=1024)
    rows: list[list[torch.Tensor]] = [[] for _ in sequences]
    while waiting := [i for i, s in enumerate(sequences) if s.num_computed < len(s.token_ids)]:
        # Prompts in chunks; their last three tokens one a step, beside the others' chunks.
        plan = []
        for i in waiting:
            left = len(sequences[i].token_ids) - sequences[i].num_computed
            plan.append((sequences[i], 1 if left <= 3 else min(left - 3, rng.choice([16, 33, 100]))))
        for i, hidden in zip(waiting, batch.step(plan), strict=True):
            rows[i].append(hidden)
    for sequence, parts in zip(sequences, rows, strict=True):
        assert torch.equal(torch.cat(parts), paged(model).prefill(sequence.token_ids))


def test_logits_of_a_row_do_not_depend_on_the_others(model: CausalLM) -> None:
    hidden = paged(model).prefill(random_tokens(70, seed=3))
    logits = model.compute_logits(hidden)
    for row in (0, 33, 69):
        assert torch.equal(model.compute_logits(hidden[row : row + 1]), logits[row : row + 1])


@pytest.mark.parametrize("block_size", [4, 16, 32])
def test_block_size_and_stale_blocks_change_nothing(model: CausalLM, block_size: int) -> None:
    tokens = random_tokens(90, seed=4)
    batch = paged(model, block_size=block_size)
    assert torch.equal(batch.prefill(tokens, 13), paged(model).prefill(tokens))
