"""Which tensors of a checkpoint may be left unread, and that all others are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model, load_pooling_heads
from proa_engine.models.unread import why_unread
from support.pooling_models import make_embedding_model
from support.tiny_models import VOCAB_SIZE, as_text_part, make_tiny_model

CPU = torch.device("cpu")
FIELDS = {
    "vocab_size": 8,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 2,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "num_nextn_predict_layers": 1,
}
PREFIX = "model.language_model."
UNREAD = (  # form of the model, name, a part of the reason or None
    ("ForCausalLM", "model.layers.0.self_attn.rotary_emb.inv_freq", "config.json"),
    ("ForCausalLM", "model.rotary_emb.inv_freq", "config.json"),
    ("ForCausalLM", "transformer.rotary_pos_emb.inv_freq", "config.json"),
    ("ForCausalLM", "model.layers.0.self_attn.inv_freq", None),
    ("ForCausalLM", "vision_tower.embeddings.position_ids", "from 0"),
    ("ForCausalLM", "mtp.fc.weight", "further tokens"),
    ("ForCausalLM", "model.mtp_layers.0.input_proj.weight", "further tokens"),
    ("ForCausalLM", "model.layers.2.eh_proj.weight", "further tokens"),
    ("ForCausalLM", "model.layers.1.eh_proj.weight", None),
    ("ForCausalLM", "model.layers.3.eh_proj.weight", None),
    ("ForCausalLM", "model.layers.20.eh_proj.weight", None),
    ("ForCausalLM", "model.vision_tower.vision_model.head.attention.in_proj_bias", "pools an image"),
    ("ForCausalLM", "model.head.bias", None),
    ("ForCausalLM", "lm_head.weight", None),
    ("ForCausalLM", "lm_head.bias", None),
    ("ForCausalLM", "score.weight", None),
    ("ForCausalLM", "model.visual.patch_embed.proj.weight", None),
    ("Model", "lm_head.weight", "no tokens"),
    ("Model", "lm_head.bias", None),
    ("ForSequenceClassification", "score.weight", "load_pooling_heads"),
    ("text part", "model.vision_tower.weight", "encoder"),
    ("text part", "multi_modal_projector.linear_1.weight", "encoder"),
    ("text part", "audio_tower.layers.0.weight", "encoder"),
    ("text part", "model.embed_audio.weight", "encoder"),
    ("text part", f"{PREFIX}layers.2.eh_proj.weight", "further tokens"),
    ("text part", f"{PREFIX}layers.0.mlp.up_proj.bias", None),
    ("text part", "model.layers.0.mlp.up_proj.weight", None),
    ("text part", "another.weight", None),
    ("text part", "lm_head.bias", None),
)


@pytest.mark.parametrize(("form", "name", "part"), UNREAD)
def test_each_tensor_that_may_be_left_unread_has_a_reason(form: str, name: str, part: str | None) -> None:
    fields: dict[str, Any] = {"architectures": [f"Llama{form}"], **FIELDS}
    if form == "text part":
        fields = {"architectures": ["LlamaForCausalLM"], "text_config": FIELDS}
    config = read_config.from_dicts(fields, {})
    reason = why_unread(name, config, PREFIX if form == "text part" else "model.", "lm_head.")
    assert reason is None if part is None else part in (reason or "")


def load(folder: Path) -> None:
    config = read_config.from_folder(folder)
    model = load_model(
        folder, config, dtype=torch.float32, device=CPU, parallel=ParallelContext(), report=lambda _: None
    )
    load_pooling_heads(folder, config, model, device=CPU)


def make_text_part(folder: Path) -> Path:
    text = make_tiny_model(folder / "text", "gemma3_text", tie_word_embeddings=True)
    return as_text_part(text, folder / "whole", "Gemma3ForConditionalGeneration", ("model.", "model."))


def make_classifier(folder: Path) -> Path:
    return make_tiny_model(folder, "qwen3", auto_class="AutoModelForSequenceClassification", num_labels=3)


def make_embedder(folder: Path) -> Path:
    return make_embedding_model(folder, "lasttoken", architecture="qwen3", dense=(24,), auto_class="AutoModel")


@pytest.mark.parametrize(
    ("make", "file", "name"),
    [
        (make_tiny_model, "model.safetensors", "model.layers.0.mlp.up_proj.bias"),
        (make_text_part, "model.safetensors", "model.layers.0.mlp.up_proj.bias"),
        (make_text_part, "model.safetensors", "another.weight"),
        (make_classifier, "model.safetensors", "score.bias"),
        (make_embedder, "2_Dense/model.safetensors", "linear2.weight"),
    ],
)
def test_a_tensor_that_nothing_takes_is_refused(
    make: Callable[[Path], Path], file: str, name: str, tmp_path: Path
) -> None:
    folder = make(tmp_path)
    load(folder)
    path = folder / file
    save_file(load_file(path) | {name: torch.zeros(3)}, path)
    with pytest.raises(ValueError, match=f"do not fit the model: unexpected {name}"):
        load(folder)


def test_keys_of_layers_that_read_an_earlier_layers_cache_are_left_unread(tmp_path: Path) -> None:
    folder = make_tiny_model(
        tmp_path,
        "gemma4_text",
        num_hidden_layers=4,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_kv_shared_layers=2,
        global_head_dim=32,
        hidden_size_per_layer_input=0,
        vocab_size_per_layer_input=VOCAB_SIZE,
    )
    path = folder / "model.safetensors"
    names = [f"model.layers.3.self_attn.{name}.weight" for name in ("k_proj", "v_proj", "k_norm")]
    save_file(load_file(path) | {name: torch.zeros(3) for name in names}, path)
    load(folder)


def test_a_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    folder = make_tiny_model(tmp_path, max_shard_size="100KB")
    (folder / "model.safetensors.index.json").unlink()
    load(folder)
    save_file({"model.norm.weight": torch.ones(64)}, folder / "another.safetensors")
    with pytest.raises(ValueError, match=r"has model\.norm\.weight in another\.safetensors and in model-\d+"):
        load(folder)
