"""Checkpoints that the quantizers write themselves, and what Proa makes of them:
`PYTHONPATH=tests:. python tests/peers/quantizers.py`.

Installs each quantizer into an environment of its own (build/quantizers), has it quantize the built-in model and a
random mixture of experts into every scheme of `quantizer_writers/`, and compares: the perplexity and the logits that
the library's own code gives in float32, and Proa's. Prints a line for each checkpoint: both perplexities, or the
sentence by which Proa refuses it. Exits with 1 if the perplexity of the built-in model is not the library's. A random
mixture has a perplexity of thousands, which rounded activations change by several tenths of a percent, so its logits
are compared.

With --fixtures FOLDER, it writes the checkpoints of tests/data/quantized anew, of models with one small layer.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import Any

import torch
from peers.quantizer_writers.common import Texts, measure, read_theirs

from proa_engine.builtin import builtin_model_folder
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models import read_config
from proa_engine.models.loader import load_model
from support.paged_model import PagedModel
from support.perplexity import unseen_documents
from support.tiny_models import make_tiny_model
from training.tokens import documents, load_tokenizer

FOLDER = Path("build/quantizers").absolute()
WRITERS = {  # and what each needs installed
    "llmcompressor": ("llmcompressor",),
    "modelopt": ("nvidia-modelopt[hf]",),
    "gptqmodel": ("gptqmodel",),
    "autoround": ("auto-round",),
}
TOLERANCE = 0.003  # of a perplexity, relative to the library's
LOGITS_TOLERANCE = 0.1  # of a random mixture's logits: their mean difference, in standard deviations of the library's
CALIBRATION_SEED = 77
FIXTURES: dict[str, dict[str, tuple[str, ...]]] = {  # of each writer and base, the schemes kept as small checkpoints
    "llmcompressor": {
        "tiny": (
            *("w4a16-asym", "w4a16-actorder", "w8a16", "w8a8", "w8a8-static-asym", "fp8", "nvfp4", "mxfp4a16"),
            "mixed-fp8-w4a16",
        ),
        "experts": ("w4a16-asym", "w8a8", "fp8-dynamic", "nvfp4a16", "mxfp4a16"),
    },
    "modelopt": {"tiny": ("fp8", "nvfp4-kv-fp8"), "experts": ("fp8-by-channel", "nvfp4")},
    "gptqmodel": {"tiny": ("4bit-asym", "4bit-desc-act", "8bit", "dynamic"), "experts": ("4bit", "8bit")},
    "autoround": {"tiny": ("auto_round-8bit",)},
}
KEPT_FILES = ("config.json", "hf_quant_config.json", "model.safetensors", "theirs.safetensors")


@dataclass(frozen=True)
class Row:
    name: str
    theirs: float
    ours: float | None  # None: refused
    text: str  # the difference of logits, or the refusal
    is_wrong: bool = False


def main() -> int:
    parser = argparse.ArgumentParser(description="Compare Proa with the quantizers on checkpoints that they write.")
    parser.add_argument("--only", default="", help="only checkpoints whose name contains this text")
    parser.add_argument("--writer", choices=WRITERS, action="append", help="only this quantizer; may be repeated")
    parser.add_argument("--fixtures", type=Path, help="write small checkpoints into this folder, compare nothing")
    parser.add_argument("--conversations", type=int, default=12)
    parser.add_argument("--questions", type=int, default=0)
    arguments = parser.parse_args()
    FOLDER.mkdir(parents=True, exist_ok=True)
    if arguments.fixtures:
        write_fixtures(arguments.fixtures, arguments.writer or list(WRITERS))
        return 0
    texts, bases = FOLDER / "texts.json", [FOLDER / "bases/builtin", FOLDER / "bases/moe"]
    write_texts(texts, arguments.conversations, arguments.questions)
    write_bases(*bases)
    for writer in arguments.writer or WRITERS:
        quantize(writer, texts, FOLDER / "checkpoints", arguments.only, bases)
    rows = list(compare(FOLDER / "checkpoints", texts, arguments.only))
    wrong = [row.name for row in rows if row.is_wrong]
    served = sum(row.ours is not None for row in rows)
    print(
        f"{len(rows)} checkpoints: {served} served, {len(rows) - served} refused; wrong: {', '.join(wrong) or 'none'}"
    )
    return 1 if wrong else 0


def write_texts(path: Path, conversations: int, questions: int) -> None:
    endless = documents(load_tokenizer(builtin_model_folder() / "tokenizer.json"), Random(CALIBRATION_SEED))
    calibration = [list(next(endless)[0])[:512] for _ in range(32)]
    path.write_text(json.dumps({"calibration": calibration, "documents": unseen_documents(conversations, questions)}))


def write_bases(builtin: Path, moe: Path) -> None:
    """The built-in model, and a random mixture of experts of its vocabulary, in whole groups and blocks."""
    names = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    builtin.mkdir(parents=True, exist_ok=True)
    for name in names:
        shutil.copy(builtin_model_folder() / name, builtin)
    sizes: dict[str, Any] = {
        "hidden_size": 256,
        "moe_intermediate_size": 128,
        "head_dim": 64,
        "vocab_size": 2048,
        "max_position_embeddings": 2048,
    }
    make_tiny_model(moe, "qwen3_moe", initializer_range=0.05, **sizes)
    for name in names[3:]:
        shutil.copy(builtin_model_folder() / name, moe)


def quantize(writer: str, texts: Path, out: Path, only: str, bases: list[Path]) -> None:
    command: list[str | Path] = [
        install(writer),
        "-m",
        f"quantizer_writers.{writer}_writer",
        "--texts",
        texts,
        "--out",
        out,
    ]
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).absolute().parent)}
    log = FOLDER / f"{writer}.log"
    with log.open("w") as errors:
        done = subprocess.run([*command, "--only", only, *bases], cwd=FOLDER, env=environment, stderr=errors)
    if done.returncode:
        raise SystemExit(f"{writer} failed; its log is {log}")


def install(writer: str) -> str:
    """The Python of the environment that has this quantizer."""
    folder = FOLDER / "environments" / writer
    python = folder / "bin/python"
    if not python.exists():
        subprocess.run(["uv", "venv", "--quiet", folder], check=True)
    subprocess.run(["uv", "pip", "install", "--quiet", "--python", python, *WRITERS[writer]], check=True)
    return str(python.absolute())


def compare(checkpoints: Path, texts_path: Path, only: str) -> Iterator[Row]:
    texts = Texts(**json.loads(texts_path.read_text()))
    for folder in sorted(checkpoints.iterdir()):
        if only in folder.name and (folder / "theirs.safetensors").exists():
            row = compare_one(folder, texts)
            ours = "refused" if row.ours is None else f"{row.ours:.5f}"
            print(f"{'WRONG ' if row.is_wrong else ''}{row.name:40} {row.theirs:.5f} {ours} {row.text}", flush=True)
            yield row


def compare_one(folder: Path, texts: Texts) -> Row:
    theirs = read_theirs(folder)
    try:
        model = load_model(
            folder,
            read_config.from_folder(folder, None),
            dtype=torch.float32,
            device=torch.device("cpu"),
            parallel=ParallelContext(),
            load_format="auto",
            report=lambda line: None,
        )
    except ValueError as refusal:
        return Row(folder.name, theirs.full.perplexity, None, str(refusal))
    ours = measure(lambda ids: model.compute_logits(PagedModel(model).prefill(ids, len(ids))), texts.documents)

    def distance(kept: torch.Tensor) -> float:
        return float((ours.kept - kept).abs().mean())

    near = min((theirs.full, theirs.weights), key=lambda logits: distance(logits.kept))
    which = "with its activations" if near is theirs.full else "with plain activations"
    error = distance(near.kept)
    if "-moe-" in folder.name:
        is_wrong = error > LOGITS_TOLERANCE * float(near.kept.std())
    else:
        is_wrong = abs(ours.perplexity / near.perplexity - 1) > TOLERANCE
    return Row(folder.name, near.perplexity, ours.perplexity, f"{which}; logits differ by {error:.5f}", is_wrong)


def write_fixtures(folder: Path, writers: list[str]) -> None:
    bases, checkpoints, texts = (FOLDER / f"fixtures/{name}" for name in ("bases", "checkpoints", "texts.json"))
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "vocab_size": 64,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 1,
    }
    experts: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    make_tiny_model(bases / "tiny", "llama", intermediate_size=128, tie_word_embeddings=True, **sizes)
    make_tiny_model(bases / "experts", "qwen3_moe", tie_word_embeddings=True, **experts, **sizes)
    rows = [Random(number).choices(range(64), k=16) for number in range(17)]
    texts.write_text(json.dumps({"calibration": rows[1:], "documents": [(rows[0], [True] * 16)]}))
    for writer in writers:
        names = [f"{writer}-{base}-{scheme}" for base, schemes in FIXTURES[writer].items() for scheme in schemes]
        quantize(writer, texts, checkpoints, ",".join(names), [bases / "tiny", bases / "experts"])
        for name in names:
            shutil.rmtree(folder / name, ignore_errors=True)
            (folder / name).mkdir(parents=True)
            for file in (checkpoints / name / kept for kept in KEPT_FILES):
                if file.exists():
                    shutil.copy(file, folder / name)


if __name__ == "__main__":
    sys.exit(main())
