"""With batch_invariant a request has the same bits on a GPU alone and among others, in any chunks, resumed, captured
and not."""

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from proa.contract import SamplingParams, TokenLogprobs
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.config import make_batch_invariant
from proa_engine.models.loader import load_model
from support.engine import build_core, request, run
from support.kernels.case import FLOATS
from support.paged_model import CachedSequence, PagedModel
from support.tiny_models import BYTES, make_tiny_model

DEVICE = "cuda"
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
PROMPT_LENGTHS = (1, 5, 16, 17, 90, 300, 411, 2, 33)
NUM_TOKENS = 30
NUM_RESUMED = 11
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3)
SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"max_num_seqs": 1},
    "in small chunks, eager": {"max_num_batched_tokens": 24, "enforce_eager": True},
    "with drafts": {"speculative_config": DRAFTS},
    "with drafts, eager": {"speculative_config": DRAFTS, "enforce_eager": True},
}


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_logits_have_their_bits_in_chunks_and_as_decodes(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, architecture, head_dim=64, hidden_size=256, intermediate_size=600)
    config = make_batch_invariant(read_config.from_folder(folder), 1)
    model = load_model(
        folder,
        config,
        dtype=dtype,
        device=torch.device(DEVICE),
        parallel=ParallelContext(),
        report=lambda line: None,
    )

    def paged(seed: int) -> PagedModel:
        return PagedModel(model, dtype=dtype, device=DEVICE, seed=seed)

    tokens, others = random.Random(1).choices(range(BYTES), k=300), random.Random(2).choices(range(BYTES), k=400)
    whole = model.compute_logits(paged(1).prefill(tokens))
    for chunk in (1, 7, 64, 299):
        assert torch.equal(model.compute_logits(paged(chunk).prefill(tokens, chunk)), whole), f"chunks of {chunk}"
    sequence, neighbour, batch = CachedSequence(tokens), CachedSequence(others), paged(2)
    batch.step([(sequence, 250)])
    for position in range(250, 270):
        hidden = batch.step([(sequence, 1), (neighbour, 1 + position % 11)])[0]
        assert torch.equal(model.compute_logits(hidden)[0], whole[position]), f"token {position} beside another"


@pytest.mark.parametrize("architecture", ["mistral", "qwen3"])
def test_tokens_and_logprobs_of_a_request_do_not_depend_on_the_engine_s_other_work(
    architecture: str, tmp_path: Path
) -> None:
    folder = make_tiny_model(tmp_path, architecture, head_dim=64)
    expected = generate(folder)
    for name, settings in SETTINGS.items():
        assert generate(folder, **settings) == expected, name
    resumed = generate(folder, [[each.token_id for each in logprobs[:NUM_RESUMED]] for logprobs in expected])
    assert resumed == [logprobs[NUM_RESUMED:] for logprobs in expected]


def generate(folder: Path, resumed: list[list[int]] | None = None, **config: Any) -> list[list[TokenLogprobs]]:
    """Return the log probabilities of each prompt's new tokens, after those with which it is resumed."""
    rows = random.Random(7)
    prompts = [rows.choices(range(BYTES), k=length) for length in PROMPT_LENGTHS]
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=3)
    settings: dict[str, Any] = {"max_num_seqs": 20, "max_num_batched_tokens": 256, "dtype": "bfloat16"}
    with build_core(folder, poison=True, device=DEVICE, batch_invariant=True, **settings | config) as engine:
        requests = [
            request(str(i), prompt, params, resumed=resumed[i] if resumed else ()) for i, prompt in enumerate(prompts)
        ]
        results = run(engine, requests)
    return [results[name.request_id].logprobs for name in requests]
