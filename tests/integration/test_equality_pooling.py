"""Pooled results equal those of sentence-transformers and `transformers` in float32, with every scheduling feature."""

import json
import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proa.contract import EngineCoreRequest, PoolingParams, PoolingTask, SamplingParams
from proa_engine.json_configs import PoolerConfig, SpeculativeConfig
from support.engine import Result, build_core, pooled, request, run
from support.pooling_models import make_embedding_model
from support.tiny_models import BYTES, make_tiny_model

EMBED = PoolingParams(task=PoolingTask.EMBED)
CLASSIFY = PoolingParams(task=PoolingTask.CLASSIFY)
DRAFTS = SpeculativeConfig(method="ngram", num_speculative_tokens=3, prompt_lookup_max=3, prompt_lookup_min=1)
PRESSED: dict[str, Any] = {"max_num_batched_tokens": 32, "num_gpu_blocks_override": 10, "max_model_len": 160}
SETTINGS: dict[str, dict[str, Any]] = {
    "chunked and pressed": PRESSED,
    "without asynchronous scheduling": PRESSED | {"async_scheduling": False},
    "with room": {},
}


def make_prompts() -> list[list[int]]:
    """Prompts of 1 to 120 tokens, some with a common prefix."""
    rows = random.Random(7)
    shared = rows.choices(range(BYTES), k=40)
    prompts = [rows.choices(range(BYTES), k=length) for length in (1, 2, 33, 65, 120)]
    return prompts + [shared + rows.choices(range(BYTES), k=rows.randint(1, 20)) for _ in range(5)]


PROMPTS = make_prompts()


@torch.inference_mode()
def embed(folder: Path) -> Tensor:
    """[prompts, size]: by sentence-transformers, one prompt at a time."""
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(str(folder), device="cpu")
    rows = [{"input_ids": torch.tensor([ids]), "attention_mask": torch.ones(1, len(ids))} for ids in PROMPTS]
    return torch.cat([model(row)["sentence_embedding"] for row in rows])


def pool(folder: Path, params: PoolingParams, **config: Any) -> Tensor:
    """[prompts, values]: by the engine."""
    with build_core(folder, **config) as engine:
        return rows(run(engine, requests(params)))


def requests(params: PoolingParams) -> list[EngineCoreRequest]:
    return [pooled(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)]


def rows(results: Mapping[str, Result]) -> Tensor:
    return torch.cat([results[str(number)].values for number in range(len(PROMPTS))])


def assert_equal_embeddings(actual: Tensor, expected: Tensor) -> None:
    assert actual.shape == expected.shape
    assert torch.cosine_similarity(actual, expected).min() > 0.9999
    torch.testing.assert_close(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
@pytest.mark.parametrize("mode", ["lasttoken", "mean_tokens", "cls_token"])
def test_embeddings_equal_those_of_sentence_transformers(tmp_path: Path, mode: str, settings: dict[str, Any]) -> None:
    folder = make_embedding_model(tmp_path, mode, architecture="qwen3")
    assert_equal_embeddings(pool(folder, EMBED, **settings), embed(folder))


def test_a_model_saved_without_its_lm_head(tmp_path: Path) -> None:
    folder = make_embedding_model(
        tmp_path, "mean_tokens", dense=(48, 40), normalize=True, architecture="llama", auto_class="AutoModel"
    )
    assert_equal_embeddings(pool(folder, EMBED, **PRESSED), embed(folder))


def test_the_user_chooses_the_pooling(tmp_path: Path) -> None:
    """`make_embedding_model` gives both models the same weights."""
    by_mean, by_last = (
        make_embedding_model(tmp_path / mode, mode, architecture="qwen3") for mode in ("mean_tokens", "lasttoken")
    )
    config = PoolerConfig(pooling_type="MEAN", use_activation=True)
    expected = torch.nn.functional.normalize(embed(by_mean), dim=-1)
    assert_equal_embeddings(pool(by_last, EMBED, pooler_config=config, **PRESSED), expected)


def test_the_first_dimensions_of_an_embedding_are_normalized(tmp_path: Path) -> None:
    folder = make_embedding_model(tmp_path, "lasttoken", normalize=True, architecture="qwen3")
    expected = torch.nn.functional.normalize(embed(folder)[:, :24], dim=-1)
    params = PoolingParams(task=PoolingTask.EMBED, dimensions=24)
    assert_equal_embeddings(pool(folder, params, **PRESSED), expected)


@pytest.mark.parametrize("drafts", [None, DRAFTS], ids=["no drafts", "drafts"])
def test_pooled_and_generating_requests_beside_each_other(tmp_path: Path, drafts: SpeculativeConfig | None) -> None:
    folder = make_embedding_model(tmp_path, "mean_tokens", architecture="qwen3", tie_word_embeddings=True)
    greedy = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    generating = [request(f"g{number}", prompt, greedy) for number, prompt in enumerate(PROMPTS)]
    with build_core(folder, **PRESSED) as engine:
        alone = run(engine, generating)
    with build_core(folder, speculative_config=drafts, **PRESSED) as engine:
        mixed = [each for pair in zip(requests(EMBED), generating, strict=True) for each in pair]
        together = run(engine, mixed)
        assert engine.core.stats().num_preemptions > 0
    assert_equal_embeddings(rows(together), embed(folder))
    assert {name: result.token_ids for name, result in alone.items()} == {
        each.request_id: together[each.request_id].token_ids for each in generating
    }


@torch.inference_mode()
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_rows_of_every_token_are_the_hidden_states(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoModel

    folder = make_tiny_model(tmp_path, "qwen3", auto_class="AutoModel")
    params = PoolingParams(task=PoolingTask.TOKEN_EMBED, use_activation=False)
    with build_core(folder, **settings) as engine:
        results = run(engine, requests(params))
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    for number, prompt in enumerate(PROMPTS):
        expected = model(torch.tensor([prompt])).last_hidden_state[0]
        torch.testing.assert_close(results[str(number)].values, expected, rtol=1e-3, atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("settings", SETTINGS.values(), ids=SETTINGS)
def test_log_probabilities_of_tokens_equal_those_of_transformers(tmp_path: Path, settings: dict[str, Any]) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path, "qwen3", tie_word_embeddings=True)
    actual = pool(folder, PoolingParams(task=PoolingTask.TOKEN_LOGPROBS, score_token_ids=(121, 110)), **settings)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    logits = torch.stack([model(torch.tensor([prompt])).logits[0, -1] for prompt in PROMPTS])
    torch.testing.assert_close(actual, logits.log_softmax(-1)[:, [121, 110]], rtol=0, atol=1e-3)


@torch.inference_mode()
def test_labels_of_every_token_equal_those_of_transformers(tmp_path: Path) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = make_tiny_model(tmp_path, "qwen3", auto_class="AutoModelForSequenceClassification", num_labels=3)
    with build_core(folder, **PRESSED) as engine:
        results = run(engine, requests(PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)))
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for number, prompt in enumerate(PROMPTS):
        expected = model.score(model.model(torch.tensor([prompt])).last_hidden_state)[0].softmax(-1)
        torch.testing.assert_close(results[str(number)].values, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("form", "num_labels"), [("ForRewardModel", 1), ("ForProcessRewardModel", 2)])
def test_rewards_of_every_token_are_those_of_two_layers(tmp_path: Path, form: str, num_labels: int) -> None:
    from transformers import AutoModel

    folder = make_tiny_model(tmp_path, "qwen2", auto_class="AutoModel")
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    size = model.config.hidden_size
    score = torch.nn.Sequential(torch.nn.Linear(size, size), torch.nn.ReLU(), torch.nn.Linear(size, num_labels))
    weights = {f"model.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    weights |= {f"score.{name}": tensor for name, tensor in score.state_dict().items()}
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": [f"Qwen2{form}"]}))
    with build_core(folder, **PRESSED) as engine:
        results = run(engine, requests(PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)))
    for number, prompt in enumerate(PROMPTS):
        logits = score(model(torch.tensor([prompt])).last_hidden_state)[0]
        expected = logits.sigmoid() if num_labels == 1 else logits.softmax(-1)
        torch.testing.assert_close(results[str(number)].values, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize(("num_labels", "activate"), [(3, None), (1, None), (3, False)])
def test_labels_equal_those_of_transformers(tmp_path: Path, num_labels: int, activate: bool | None) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = make_tiny_model(tmp_path, "qwen3", auto_class="AutoModelForSequenceClassification", num_labels=num_labels)
    params = PoolingParams(task=PoolingTask.CLASSIFY, use_activation=activate)
    actual = pool(folder, params, **PRESSED)
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    expected = torch.cat([model(torch.tensor([prompt])).logits for prompt in PROMPTS])
    if activate is None:
        expected = expected.sigmoid() if num_labels == 1 else expected.softmax(-1)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)
