"""Train the built-in model on one CPU core: `python -m training.train --steps 3800`.

Text is generated during training, so each step has new conversations. Writes tokenizer.json and checkpoint.pt into
`--folder`, from which `training.export` makes the model directory. The checkpoint is written every three minutes and
loaded at the start: an interrupted run resumes, and a finished one continues with more `--steps`.
"""

import argparse
import os
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from random import Random

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional

from training.network import Network, NetworkConfig
from training.optimizer import Optimizers, make_optimizers, rate_fraction, set_rate
from training.tokens import Document, documents, load_tokenizer, train_tokenizer

Batch = tuple[Tensor, Tensor]
_SAVE_EVERY_S = 180
# Rows and tokens per row. Short rows first, as attention is cheap there; at the end two of five steps have long ones.
_SHORT_ROWS, _LONG_ROWS, _SHORT_SHARE = (16, 256), (2, 2048), 0.7


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the built-in model, or resume an interrupted run.")
    parser.add_argument(
        "--folder", type=Path, default=Path("training/run"), help="directory of the tokenizer and the checkpoint"
    )
    parser.add_argument("--steps", type=int, default=3800, help="total steps, of 4096 tokens each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(arguments.seed)
    arguments.folder.mkdir(parents=True, exist_ok=True)
    train(arguments.folder, arguments.steps, arguments.seed)


def train(folder: Path, steps: int, seed: int) -> None:
    tokenizer = prepare_tokenizer(folder / "tokenizer.json", seed)
    network = Network(NetworkConfig(vocab_size=tokenizer.get_vocab_size()))
    optimizers = make_optimizers(network)
    checkpoint = folder / "checkpoint.pt"
    first = restore(checkpoint, network, optimizers) if checkpoint.exists() else 0
    print(f"{sum(p.numel() for p in network.parameters()):,} parameters, step {first} of {steps}", flush=True)
    # The step is part of the seed, so that a resumed run does not repeat the text of its first steps.
    stream = documents(tokenizer, Random(f"{seed}:{first}"))
    saved = started = time.monotonic()
    for step in range(first, steps):
        shape = _LONG_ROWS if step >= steps * _SHORT_SHARE and step % 5 < 2 else _SHORT_ROWS
        set_rate(optimizers, rate_fraction(step, steps))
        loss = train_step(network, optimizers, next_batch(stream, *shape))
        if step % 10 == 9 or step == steps - 1:
            report(step + 1, steps, loss, step + 1 - first, time.monotonic() - started)
        if step == steps - 1 or time.monotonic() - saved > _SAVE_EVERY_S:
            save(checkpoint, network, optimizers, step + 1)
            saved = time.monotonic()


def prepare_tokenizer(path: Path, seed: int) -> Tokenizer:
    if not path.exists():
        train_tokenizer(seed).save(str(path))
    return load_tokenizer(path)


def next_batch(stream: Iterator[Document], rows: int, length: int) -> Batch:
    """Pack documents into rows: token ids and the mask of tokens to learn, each [rows, length + 1]."""
    token_ids: list[int] = []
    learn: list[bool] = []
    needed = rows * (length + 1)
    while len(token_ids) < needed:
        document_ids, document_learn = next(stream)
        token_ids += document_ids
        learn += document_learn
    shape = (rows, length + 1)
    return torch.tensor(token_ids[:needed]).view(shape), torch.tensor(learn[:needed]).view(shape)


def train_step(network: Network, optimizers: Optimizers, batch: Batch) -> float:
    token_ids, learn = batch
    wanted = learn[:, 1:]
    hidden = network(token_ids[:, :-1])[wanted]
    loss = functional.cross_entropy(network.logits(hidden), token_ids[:, 1:][wanted])
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
