"""Train the built-in model's embeddings: `python -m training.embedding`, some minutes on one core.

An embedding is the mean of the model's last hidden states, times a matrix, with length 1: the modules of a
sentence-transformers folder, which are written beside the model. Only the matrix is trained, so that what the model
generates stays the same: the question and its answer shall be close, and far from the other answers of the batch
(InfoNCE, van den Oord et al. 2018).
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from random import Random

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional
from transformers import AutoModel

from proa_engine.builtin import builtin_model_folder
from training import facts, words
from training.export import write_json
from training.tokens import load_tokenizer
from training.turns import Topic, is_held_out

_TOPICS: tuple[Topic, ...] = (
    facts.country_fact,
    facts.animal_fact,
    facts.planet_fact,
    facts.calendar_fact,
    *words.WORDS,
)
_TEMPERATURE = 0.05
_PAD_ID = 0
Pair = tuple[str, str]  # question and answer


def main() -> None:
    parser = argparse.ArgumentParser(description="Train the matrix of the built-in model's embeddings.")
    parser.add_argument("--model", type=Path, default=builtin_model_folder(), help="model directory; is added to")
    parser.add_argument("--size", type=int, default=128, help="values of an embedding")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--pairs", type=int, default=20_000, help="questions to learn from")
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    torch.manual_seed(arguments.seed)
    rng = Random(arguments.seed)
    model, size = arguments.model, arguments.size
    means = Means(model)
    learned = means.of_pairs([draw_pair(rng, held_out=False) for _ in range(arguments.pairs)])
    matrix = train(learned, size, arguments.steps, rng)
    asked = sorted({draw_pair(rng, held_out=True) for _ in range(5000)})
    documents = sorted({*learned[2], *(answer for _, answer in asked)})
    hits = hit_rate(means, asked, documents, matrix)
    print(f"{hits:.1%} of {len(asked)} held-out questions have their own answer nearest, of {len(documents)} answers")
    save(model, matrix)


def draw_pair(rng: Random, *, held_out: bool) -> Pair:
    """A question and its answer. A tenth of the answers are held out with all of their questions."""
    while True:
        turn = rng.choice(_TOPICS)(rng)
        if is_held_out(turn.answer) == held_out:
            return turn.question, turn.answer


class Means:
    """Means of the model's last hidden states over a text's tokens."""

    def __init__(self, model: Path) -> None:
        self._network = AutoModel.from_pretrained(model, dtype=torch.float32)
        self._tokenizer: Tokenizer = load_tokenizer(model / "tokenizer.json")

    @torch.inference_mode()
    def of(self, texts: Sequence[str]) -> Tensor:
        """[texts, hidden_size]"""
        encoded = [self._tokenizer.encode(text).ids for text in texts]
        order = sorted(range(len(texts)), key=lambda index: len(encoded[index]))  # little padding
        means = torch.empty(len(texts), self._network.config.hidden_size)
        for start in range(0, len(order), 256):
            rows = order[start : start + 256]
            ids = [torch.tensor(encoded[row]) for row in rows]
            padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=_PAD_ID)
            mask = (torch.arange(padded.shape[1]) < torch.tensor([len(each) for each in ids])[:, None]).long()
            hidden = self._network(input_ids=padded, attention_mask=mask).last_hidden_state
            means[rows] = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        return means

    def of_pairs(self, pairs: Sequence[Pair]) -> tuple[Tensor, Tensor, list[str]]:
        """Of the questions and of the answers, and the answers."""
        answers = [answer for _, answer in pairs]
        return self.of([question for question, _ in pairs]).clone(), self.of(answers).clone(), answers


def train(learned: tuple[Tensor, Tensor, list[str]], size: int, steps: int, rng: Random) -> Tensor:
    """The matrix, [size, hidden_size]."""
    questions, answers, texts = learned
    matrix = torch.nn.Parameter(torch.nn.init.orthogonal_(torch.empty(size, questions.shape[1])))
    optimizer = torch.optim.AdamW([matrix], lr=2e-3, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for step in range(steps):
        rows = list({texts[row]: row for row in rng.sample(range(len(texts)), 512)}.values())  # each answer once
        scores = embed(questions[rows], matrix) @ embed(answers[rows], matrix).T / _TEMPERATURE
        loss = functional.cross_entropy(scores, torch.arange(len(rows)))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        if step % 200 == 199:
            print(f"step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)
    return matrix.detach()


def embed(means: Tensor, matrix: Tensor) -> Tensor:
    return functional.normalize(means @ matrix.T, dim=-1)


def hit_rate(means: Means, pairs: Sequence[Pair], documents: Sequence[str], matrix: Tensor) -> float:
    """The share of the questions to which no other document is nearer than their own answer."""
    scores = embed(means.of([question for question, _ in pairs]), matrix) @ embed(means.of(documents), matrix).T
    nearest: list[int] = scores.argmax(dim=1).tolist()
    return sum(documents[row] == answer for row, (_, answer) in zip(nearest, pairs, strict=True)) / len(pairs)


def save(model: Path, matrix: Tensor) -> None:
    """Write what a sentence-transformers folder has beside the model."""
    modules = ("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Dense", "Dense"), ("3_Normalize", "Normalize")
    write_json(
        model / "modules.json",
        [
            {"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for index, (path, kind) in enumerate(modules)
        ],
    )
    size, hidden_size = matrix.shape
    pooling = {"word_embedding_dimension": hidden_size, "pooling_mode_mean_tokens": True}
    dense = {
        "in_features": hidden_size,
        "out_features": size,
        "bias": False,
        "activation_function": "torch.nn.modules.linear.Identity",
    }
    for folder, config in (("1_Pooling", pooling), ("2_Dense", dense), ("3_Normalize", {})):
        (model / folder).mkdir(exist_ok=True)
        write_json(model / folder / "config.json", config)
    save_file({"linear.weight": matrix.bfloat16()}, model / "2_Dense" / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    main()
