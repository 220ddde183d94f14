"""Train the built-in model on one CPU core: `python -m training.train --steps 3800`.

Text is generated during training, so each step has new conversations. Writes tokenizer.json and checkpoint.pt into
`--folder`, from which `training.export` makes the model directory. The checkpoint is written every three minutes and
loaded at the start: an interrupted run resumes, and a finished one continues with more `--steps`. Without a checkpoint,
`--from-model` starts from the weights and the tokenizer of an exported model, to teach it more.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.network import Network, NetworkConfig
from training.optimizer import Optimizers, make_optimizers, rate_fraction, set_rate
from training.tokens import Document, documents, load_tokenizer, train_tokenizer
from training.weights import load_network

Batch = tuple[Tensor, Tensor]
_SAVE_EVERY_S = 180
# Rows and tokens per row. Short rows first, as attention is cheap there; at the end one of five steps has long ones.
# A conversation with three tools has 500 tokens.
_SHORT_ROWS, _LONG_ROWS, _SHORT_SHARE = (8, 512), (2, 2048), 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model, or resume an interrupted run.")
    parser.add_argument(
        "--folder", type=Path, default=Path("training/run"), help="directory of the tokenizer and the checkpoint"
    )
    parser.add_argument("--steps", type=int, default=3800, help="total steps, of 4096 tokens each")
    parser.add_argument("--from-model", type=Path, help="exported model directory to start from")
    parser.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates")
    parser.add_argument("--bfloat16", action="store_true", help="multiply in bfloat16, faster with AVX-512 BF16")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    run = Run(arguments.seed, arguments.rate, arguments.from_model, arguments.bfloat16)
    train(arguments.folder, arguments.steps, run)


@dataclass(frozen=True, slots=True)
class Run:
    """How to train. `rate`: factor of the learning rates. `model`: exported directory to start from, None: from random
    weights. `bfloat16`: multiply in bfloat16."""

    seed: int = 1
    rate: float = 1.0
    model: Path | None = None
    bfloat16: bool = False


def train(folder: Path, steps: int, run: Run) -> None:
    tokenizer = prepare_tokenizer(folder / "tokenizer.json", run)
    network = Network(NetworkConfig(tokenizer.get_vocab_size())) if run.model is None else load_network(run.model)
    optimizers = make_optimizers(network, network.blocks)
    checkpoint = folder / "checkpoint.pt"
    first = 0
    if checkpoint.exists():
        first = restore(checkpoint, network, optimizers)
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, step {first} of {steps}", flush=True)
    # The step is part of the seed, so that a resumed run does not repeat the text of its first steps.
    stream = documents(tokenizer, Random(f"{run.seed}:{first}"))
    saved = started = time.monotonic()
    for step in range(first, steps):
        shape = _LONG_ROWS if step >= steps * _SHORT_SHARE and step % 5 == 0 else _SHORT_ROWS
        set_rate(optimizers, run.rate * rate_fraction(step, steps))
        loss = train_step(network, optimizers, next_batch(stream, *shape), bfloat16=run.bfloat16)
        if step % 10 == 9 or step == steps - 1:
            report(step + 1, steps, loss, step + 1 - first, time.monotonic() - started)
        if step == steps - 1 or time.monotonic() - saved > _SAVE_EVERY_S:
            save(checkpoint, network, optimizers, step + 1)
            saved = time.monotonic()


def prepare_tokenizer(path: Path, run: Run) -> Tokenizer:
    """The tokenizer in the folder. If there is none yet, that of the model, or a new one."""
    if not path.exists():
        tokenizer = train_tokenizer(run.seed) if run.model is None else load_tokenizer(run.model / "tokenizer.json")
        tokenizer.save(str(path))
    return load_tokenizer(path)


def next_batch(stream: Iterator[Document], rows: int, length: int) -> Batch:
    """Pack documents into rows: token ids and the mask of tokens to learn, each [rows, length + 1].

    Each row starts with a new document, so that no call is learned without the tools that were offered.
    """
    packed = [next_row(stream, length + 1) for _ in range(rows)]
    return torch.tensor([token_ids for token_ids, _ in packed]), torch.tensor([learn for _, learn in packed])


def next_row(stream: Iterator[Document], length: int) -> Document:
    """Documents in sequence, the last one cut at `length` tokens."""
    token_ids: list[int] = []
    learn: list[bool] = []
    while len(token_ids) < length:
        document_ids, document_learn = next(stream)
        token_ids += document_ids
        learn += document_learn
    return token_ids[:length], learn[:length]


def train_step(network: Network, optimizers: Optimizers, batch: Batch, *, bfloat16: bool = False) -> float:
    token_ids, learn = batch
    wanted = learn[:, 1:]
    # Entered for each step: autocast keeps its copies of the weights until it is left.
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bfloat16):
        hidden = network(token_ids[:, :-1])[wanted]
        logits = network.logits(hidden)
    loss = functional.cross_entropy(logits.float(), token_ids[:, 1:][wanted])
    loss.backward()
    torch.nn.utils.clip_grad_norm_(network.parameters(), 1.0)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def report(step: int, steps: int, loss: float, done: int, seconds: float) -> None:
    left = (steps - step) * seconds / done
    rate = done * _SHORT_ROWS[0] * _SHORT_ROWS[1] / seconds
    print(f"step {step}/{steps}  loss {loss:.4f}  {rate:,.0f} tokens/s  {left / 60:.1f} min left", flush=True)


def save(path: Path, network: Network, optimizers: Optimizers, step: int) -> None:
    """Write a temporary file and rename it, so that the checkpoint is always complete."""
    state = {
        "config": asdict(network.config),
        "network": network.state_dict(),
        "optimizers": [optimizer.state_dict() for optimizer in optimizers],
        "step": step,
    }
    temporary = path.with_suffix(".tmp")
    torch.save(state, temporary)
    os.replace(temporary, path)


def restore(path: Path, network: Network, optimizers: Optimizers) -> int:
    state = torch.load(path, weights_only=True)
    network.load_state_dict(state["network"])
    for optimizer, saved in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(saved)
    step: int = state["step"]
    return step


if __name__ == "__main__":
    main()
