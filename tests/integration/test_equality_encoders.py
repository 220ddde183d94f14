"""Encoders: embeddings equal those of sentence-transformers, and labels of pairs those of `transformers`."""

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from proa.contract import PoolingParams, PoolingTask
from support.engine import build_core, pooled, run
from support.pooling_models import make_embedding_model
from support.tiny_models import BYTES, make_tiny_model

SETTINGS: dict[str, Any] = {"max_num_batched_tokens": 150, "max_num_seqs": 4}
MODELS: dict[str, dict[str, Any]] = {
    "bert": {"pad_token_id": 0, "max_position_embeddings": 160, "type_vocab_size": 2},
    "xlm-roberta": {"pad_token_id": 1, "max_position_embeddings": 160, "type_vocab_size": 1},
    "modernbert": {
        "pad_token_id": 1,
        "num_hidden_layers": 3,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
        "max_position_embeddings": 160,
    },
    "gemma3_text": {  # EmbeddingGemma; its `sliding_window` counts both sides
        "pad_token_id": 0,
        "num_hidden_layers": 3,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        "sliding_window": 16,
        "max_position_embeddings": 160,
        "use_bidirectional_attention": True,
    },
}


def make_prompts() -> list[list[int]]:
    """Of 1 to 120 tokens, without a padding token."""
    rows = random.Random(11)
    return [rows.choices(range(2, BYTES), k=length) for length in (1, 2, 9, 33, 64, 65, 120, 17)]


PROMPTS = make_prompts()


@torch.inference_mode()
@pytest.mark.parametrize("async_scheduling", [True, False])
@pytest.mark.parametrize("mode", ["cls_token", "mean_tokens"])
@pytest.mark.parametrize("name", MODELS)
def test_embeddings_equal_those_of_sentence_transformers(
    tmp_path: Path, name: str, mode: str, async_scheduling: bool
) -> None:
    from sentence_transformers import SentenceTransformer

    dense = (96, 48) if name == "gemma3_text" else ()
    folder = make_embedding_model(
        tmp_path, mode, dense=dense, normalize=True, architecture=name, auto_class="AutoModel", **MODELS[name]
    )
    with build_core(folder, async_scheduling=async_scheduling, **SETTINGS) as engine:
        params = PoolingParams(task=PoolingTask.EMBED)
        results = run(engine, [pooled(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)])
        assert len([plan for plan in engine.plans if not plan.is_empty]) < len(PROMPTS)
        assert engine.core.counters().cache.cached_blocks == (0,)
    actual = torch.cat([results[str(number)].values for number in range(len(PROMPTS))])
    model = SentenceTransformer(str(folder), device="cpu")
    expected = torch.cat([model(features(prompt))["sentence_embedding"] for prompt in PROMPTS])
    assert torch.cosine_similarity(actual, expected).min() > 0.9999
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("saved_by", ["PyLate", "ColBERT"])
def test_embeddings_of_tokens_of_late_interaction_models(tmp_path: Path, saved_by: str) -> None:
    from transformers import AutoModel

    folder = make_tiny_model(tmp_path, "bert", auto_class="AutoModel", **MODELS["bert"])
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    linear = torch.randn(24, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    (add_pylate_modules if saved_by == "PyLate" else save_as_colbert)(folder, linear)
    with build_core(folder, **SETTINGS) as engine:
        assert [*engine.executor.started.model_config.pooling.kinds] == [PoolingTask.TOKEN_EMBED]
        params = PoolingParams(task=PoolingTask.TOKEN_EMBED)
        results = run(engine, [pooled(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)])
    for number, prompt in enumerate(PROMPTS):
        expected = torch.nn.functional.normalize(model(**features(prompt)).last_hidden_state[0] @ linear.T, dim=-1)
        torch.testing.assert_close(results[str(number)].values, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
@pytest.mark.parametrize("name", ["bert", "modernbert"])
def test_tokens_that_expand_a_query_attend_to_it_and_none_attends_to_them(name: str, tmp_path: Path) -> None:
    """As PyLate: the library's model with a mask of attention that ends before them."""
    from transformers import AutoModel

    folder = make_tiny_model(tmp_path, name, auto_class="AutoModel", **MODELS[name])
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    add_pylate_modules(folder, torch.eye(model.config.hidden_size))
    starts = [1, *(len(prompt) // 2 for prompt in PROMPTS[1:-1]), None]
    with build_core(folder, **SETTINGS) as engine:
        params = [PoolingParams(task=PoolingTask.TOKEN_EMBED, expansion_start=start) for start in starts]
        results = run(engine, [pooled(str(n), *each) for n, each in enumerate(zip(PROMPTS, params, strict=True))])
    for number, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True)):
        mask = torch.ones(1, len(prompt), dtype=torch.int64)
        mask[:, start:] = 0 if start else 1
        hidden = model(**features(prompt) | {"attention_mask": mask}).last_hidden_state[0]
        expected = torch.nn.functional.normalize(hidden, dim=-1)
        torch.testing.assert_close(results[str(number)].values, expected, rtol=0, atol=1e-4)


@torch.inference_mode()
def test_weights_of_tokens_equal_those_of_bge_m3_s_code(tmp_path: Path) -> None:
    """FlagEmbedding computes relu(sparse_linear(hidden states)), and its embeddings as sentence-transformers."""
    from transformers import AutoModel

    options = MODELS["xlm-roberta"] | {"architecture": "xlm-roberta", "auto_class": "AutoModel"}
    folder = make_embedding_model(tmp_path, "cls_token", normalize=True, **options)
    model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    weight = torch.randn(1, model.config.hidden_size, generator=torch.Generator().manual_seed(5))
    torch.save({"weight": weight, "bias": torch.tensor([0.1])}, folder / "sparse_linear.pt")
    with build_core(folder, **SETTINGS) as engine:
        kinds = engine.executor.started.model_config.pooling.kinds
        assert {*kinds} == {PoolingTask.EMBED, PoolingTask.TOKEN_EMBED, PoolingTask.TOKEN_CLASSIFY}
        params = PoolingParams(task=PoolingTask.TOKEN_CLASSIFY)
        results = run(engine, [pooled(str(number), prompt, params) for number, prompt in enumerate(PROMPTS)])
        embedding = run(engine, [pooled("e", PROMPTS[3], PoolingParams(task=PoolingTask.EMBED))])["e"].values
    for number, prompt in enumerate(PROMPTS):
        expected = torch.relu(model(**features(prompt)).last_hidden_state[0] @ weight.T + 0.1)
        torch.testing.assert_close(results[str(number)].values, expected, rtol=0, atol=1e-4)
    assert {bool(value > 0) for each in results.values() for value in each.values.flatten()} == {False, True}
    first = model(**features(PROMPTS[3])).last_hidden_state[0, :1]
    torch.testing.assert_close(embedding, torch.nn.functional.normalize(first, dim=-1), rtol=0, atol=1e-4)


@pytest.mark.parametrize("content", [b"", b"no pickle", b"cos\nsystem\n(S'true'\ntR."])
def test_a_file_of_weights_that_is_no_tensor_is_refused(content: bytes, tmp_path: Path) -> None:
    folder = make_embedding_model(
        tmp_path, "cls_token", architecture="xlm-roberta", auto_class="AutoModel", **MODELS["xlm-roberta"]
    )
    (folder / "sparse_linear.pt").write_bytes(content)
    with pytest.raises(ValueError, match=r"sparse_linear\.pt cannot be read"), build_core(folder):
        pass


def add_pylate_modules(folder: Path, linear: Tensor) -> None:
    types = ["sentence_transformers.models.Transformer.Transformer", "pylate.models.Dense.Dense"]
    listed = [{"idx": idx, "path": path, "type": types[idx]} for idx, path in enumerate(["", "1_Dense"])]
    (folder / "modules.json").write_text(json.dumps(listed))
    activation = "torch.nn.modules.linear.Identity"
    sizes = {"in_features": linear.shape[1], "out_features": linear.shape[0], "bias": False}
    (folder / "1_Dense").mkdir()
    (folder / "1_Dense" / "config.json").write_text(json.dumps({**sizes, "activation_function": activation}))
    save_file({"linear.weight": linear}, folder / "1_Dense" / "model.safetensors")


def save_as_colbert(folder: Path, linear: Tensor) -> None:
    weights = {f"bert.{name}": tensor for name, tensor in load_file(folder / "model.safetensors").items()}
    save_file(weights | {"linear.weight": linear}, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"architectures": ["HF_ColBERT"]}))


def test_weights_of_the_library_s_pooler_may_be_absent(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "bert", auto_class="AutoModel", **MODELS["bert"])
    request = pooled("a", PROMPTS[3], PoolingParams(task=PoolingTask.EMBED))
    with build_core(folder, **SETTINGS) as engine:
        expected = run(engine, [request])["a"].values
    weights = load_file(folder / "model.safetensors")
    rest = {name: tensor for name, tensor in weights.items() if not name.startswith("pooler.")}
    assert len(rest) < len(weights)
    save_file(rest, folder / "model.safetensors", metadata={"format": "pt"})
    with build_core(folder, **SETTINGS) as engine:
        torch.testing.assert_close(run(engine, [request])["a"].values, expected)


def test_a_causal_model_is_not_taken_for_an_encoder(tmp_path: Path) -> None:
    causal = MODELS["gemma3_text"] | {"use_bidirectional_attention": False}
    folder = make_tiny_model(tmp_path, "gemma3_text", auto_class="AutoModel", **causal)
    with pytest.raises(ValueError, match="Gemma3TextModel cannot be run through transformers"), build_core(folder):
        pass


@torch.inference_mode()
@pytest.mark.parametrize("name", [name for name in MODELS if name != "gemma3_text"])  # has no such head
def test_labels_of_pairs_equal_those_of_transformers(tmp_path: Path, name: str) -> None:
    from transformers import AutoModelForSequenceClassification

    folder = make_tiny_model(
        tmp_path, name, auto_class="AutoModelForSequenceClassification", num_labels=1, **MODELS[name]
    )
    starts = [None if len(prompt) < 9 else len(prompt) // 3 for prompt in PROMPTS]
    with build_core(folder, **SETTINGS) as engine:
        results = run(
            engine,
            [
                pooled(
                    str(number),
                    prompt,
                    PoolingParams(task=PoolingTask.CLASSIFY, use_activation=False, second_segment_start=start),
                )
                for number, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True))
            ],
        )
    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    for number, (prompt, start) in enumerate(zip(PROMPTS, starts, strict=True)):
        inputs = features(prompt)
        if start is not None and name == "bert":
            inputs["token_type_ids"] = (torch.arange(len(prompt)) >= start).long()[None]
        torch.testing.assert_close(results[str(number)].values, model(**inputs).logits, rtol=0, atol=1e-4)


def features(prompt: list[int]) -> dict[str, Tensor]:
    return {"input_ids": torch.tensor([prompt]), "attention_mask": torch.ones(1, len(prompt), dtype=torch.int64)}


def test_a_prompt_that_does_not_fit_into_a_step_is_too_long(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, "bert", auto_class="AutoModel", **MODELS["bert"])
    with build_core(folder, max_num_batched_tokens=64, max_num_seqs=4) as engine:
        assert engine.executor.started.max_model_len == 64
    with pytest.raises(ValueError, match="max_model_len 100 of an encoder exceeds max_num_batched_tokens 64"):
        build_core(folder, max_num_batched_tokens=64, max_model_len=100).__enter__()
