"""What every writer does: quantize a base into each scheme, save it, and compute logits by the library's own code.

Runs in a quantizer's environment, without Proa. Beside each checkpoint lies `theirs.safetensors`: the logits that the
library gives in float32 for the first documents, once with quantized weights alone and once with quantized activations
too; and its metadata hold the perplexities of all documents.
"""

import argparse
import json
import math
import shutil
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

Forward = Callable[[list[int]], torch.Tensor]  # token ids to logits [tokens, vocabulary]
KEPT = 3  # documents whose logits are kept


@dataclass(frozen=True)
class Texts:
    """Token ids: those to calibrate with, and documents with a mark for each token that counts."""

    calibration: list[list[int]]
    documents: list[tuple[list[int], list[bool]]]


@dataclass(frozen=True)
class Logits:
    kept: torch.Tensor  # of the first documents, one after another
    perplexity: float


@dataclass(frozen=True)
class Theirs:
    """What the library computes: with activations as they are, and as its scheme has them."""

    weights: Logits
    full: Logits


Write = Callable[[Path, Path, Texts], Theirs]  # base, folder of the new checkpoint, texts


@torch.inference_mode()
def measure(forward: Forward, documents: list[tuple[list[int], list[bool]]]) -> Logits:
    total, count, kept = 0.0, 0, []
    for number, (ids, marked) in enumerate(documents):
        logits = forward(ids).float()
        if number < KEPT:
            kept.append(logits)
        chosen = logits[:-1].log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        counted = torch.tensor(marked[1:])
        total -= float(chosen[counted].sum())
        count += int(counted.sum())
    return Logits(torch.cat(kept), math.exp(total / max(count, 1)))


def measure_model(model: torch.nn.Module, texts: Texts) -> Logits:
    """Of a causal language model of `transformers`."""
    return measure(lambda ids: model(torch.tensor([ids])).logits[0], texts.documents)


def dense_twin(folder: Path, dense: Mapping[str, torch.Tensor]) -> torch.nn.Module:
    """In float32, by `transformers`: `dense` holds, by name, what the library made of each quantized matrix."""
    from transformers import AutoModelForCausalLM

    modules = {name.rpartition(".")[0] for name in dense}

    def is_gone(name: str) -> bool:
        return name.endswith(("k_scale", "v_scale")) or (
            name.rpartition(".")[0] in modules and not name.endswith(".bias")
        )

    stored = load_file(folder / "model.safetensors")
    tensors = {name: tensor for name, tensor in stored.items() if not is_gone(name)} | dict(dense)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    with tempfile.TemporaryDirectory() as twin:
        in_float32 = {name: tensor.float().contiguous() for name, tensor in tensors.items()}
        save_file(in_float32, Path(twin) / "model.safetensors", {"format": "pt"})
        (Path(twin) / "config.json").write_text(json.dumps(config))
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            twin, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
    model: torch.nn.Module = loaded[0]
    missing = sorted(loaded[1]["missing_keys"])
    assert not missing, f"transformers leaves weights at random: {missing[:3]}"
    return model.eval()


def write_theirs(theirs: Theirs, texts: Texts, folder: Path) -> None:
    ids = [token for document, _ in texts.documents[:KEPT] for token in document]
    tensors = {"ids": torch.tensor(ids), "weights": theirs.weights.kept.clone(), "full": theirs.full.kept.clone()}
    if torch.equal(tensors["weights"], tensors["full"]):
        del tensors["full"]
    perplexities = {"weights": repr(theirs.weights.perplexity), "full": repr(theirs.full.perplexity)}
    save_file(tensors, folder / "theirs.safetensors", perplexities)


def read_theirs(folder: Path) -> Theirs:
    with safe_open(folder / "theirs.safetensors", "pt") as file:
        perplexities = {name: float(text) for name, text in file.metadata().items()}
    tensors = load_file(folder / "theirs.safetensors")
    weights = Logits(tensors["weights"], perplexities["weights"])
    return Theirs(weights, Logits(tensors["full"], perplexities["full"]) if "full" in tensors else weights)


def main(writer: str, schemes: Mapping[str, Write]) -> None:
    parser = argparse.ArgumentParser(description=f"Checkpoints by {writer}.")
    parser.add_argument("--texts", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="comma-separated parts of names")
    parser.add_argument("bases", nargs="+", type=Path)
    arguments = parser.parse_args()
    texts = Texts(**json.loads(arguments.texts.read_text()))
    for base in arguments.bases:
        for scheme, write in schemes.items():
            name = f"{writer}-{base.name}-{scheme}"
            wanted = any(part in name for part in arguments.only.split(","))
            if wanted and not (arguments.out / name / "theirs.safetensors").exists():
                _write(write, base, arguments.out / name, texts)


def _write(write: Write, base: Path, folder: Path, texts: Texts) -> None:
    torch.manual_seed(0)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    try:
        theirs = write(base, folder, texts)
    except Exception as error:
        (folder / "failed.txt").write_text(traceback.format_exc())
        print(f"FAILED {folder.name}: {type(error).__name__}: {str(error)[:200]}", flush=True)
        return
    for file in ("tokenizer.json", "tokenizer_config.json"):
        if (base / file).exists() and not (folder / file).exists():
            shutil.copy(base / file, folder / file)
    write_theirs(theirs, texts, folder)
    print(f"{folder.name}: {theirs.weights.perplexity:.5f}, with activations {theirs.full.perplexity:.5f}", flush=True)
