"""Export a checkpoint as a Hugging Face model directory: `python -m training.export`.

Weights are stored as bfloat16, which halves the files.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from training.network import NetworkConfig
from training.tokens import ASSISTANT, BEGIN, CHAT_TEMPLATE, END, PAD, SYSTEM, USER, load_tokenizer
from training.weights import to_huggingface

_HOME = Path(__file__).parents[1] / "engine" / "proa_engine" / "builtin" / "model"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the model folder of the newest checkpoint.")
    parser.add_argument("--folder", type=Path, default=Path("training/run"), help="directory of the checkpoint")
    parser.add_argument("--output", type=Path, default=_HOME, help="model directory to write")
    arguments = parser.parse_args()
    export(arguments.folder, arguments.output)


def export(folder: Path, output: Path) -> None:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)
    config = NetworkConfig(**state["config"])
    tensors = to_huggingface(config, state["network"])
    assert all(bool(tensor.isfinite().all()) for tensor in tensors.values())
    tokenizer = load_tokenizer(folder / "tokenizer.json")
    ids = {token: tokenizer.get_vocab()[token] for token in (BEGIN, END, PAD)}
    output.mkdir(parents=True, exist_ok=True)
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save(str(output / "tokenizer.json"))
    write_json(output / "config.json", model_config(config, ids))
    write_json(output / "tokenizer_config.json", tokenizer_config(config))
    generation = {"bos_token_id": ids[BEGIN], "eos_token_id": ids[END], "pad_token_id": ids[PAD], "do_sample": False}
    write_json(output / "generation_config.json", generation)


def model_config(config: NetworkConfig, ids: dict[str, int]) -> dict[str, object]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "max_position_embeddings": config.max_position_embeddings,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": ids[BEGIN],
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }


def tokenizer_config(config: NetworkConfig) -> dict[str, object]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [SYSTEM, USER, ASSISTANT],
        "model_max_length": config.max_position_embeddings,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def write_json(path: Path, content: Mapping[str, object] | Sequence[object]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


if __name__ == "__main__":
    main()
