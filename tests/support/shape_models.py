"""Folders of real models' shapes: a config.json and nothing else."""

import json
from pathlib import Path
from typing import Any


def _fields(architecture: str, hidden: int, inner: int, heads: int, kv_heads: int, vocab: int, **more: Any) -> Any:
    return {
        "architectures": [architecture],
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocab,
        "num_hidden_layers": 2,
        "max_position_embeddings": 4096,
        "eos_token_id": 2,
    } | more


REAL_MODELS = {
    "Llama-3.1-8B": _fields("LlamaForCausalLM", 4096, 14336, 32, 8, 128256),
    "Mistral-7B-v0.1": _fields("MistralForCausalLM", 4096, 14336, 32, 8, 32000, sliding_window=4096),
    "Qwen2.5-0.5B": _fields("Qwen2ForCausalLM", 896, 4864, 14, 2, 151936),
    "Qwen3-0.6B": _fields("Qwen3ForCausalLM", 1024, 3072, 16, 8, 151936, head_dim=128, tie_word_embeddings=True),
}


def make_shape_model(folder: Path, name: str) -> Path:
    (folder / "config.json").write_text(json.dumps(REAL_MODELS[name]))
    return folder
