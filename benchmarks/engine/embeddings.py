"""Documents a second of an embedding model on a CPU, by `LLM.embed` and by sentence-transformers.

    PYTHONPATH=tests python -m benchmarks.engine.embeddings --architecture bert --documents 256

Both run the same model with random weights in float32, of all-MiniLM-L6-v2's shape (bert) or six layers of its width
(qwen3), on documents of random lengths. They take turns; the best of the rounds counts. The least cosine between their
embeddings is printed too.
"""

import argparse
import random
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from proa_engine import LLM
from support.pooling_models import make_embedding_model

SHAPE: dict[str, Any] = {
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--architecture", choices=["bert", "qwen3"], default="bert")
    parser.add_argument("--documents", type=int, default=256)
    parser.add_argument("--shortest", type=int, default=16, help="tokens")
    parser.add_argument("--longest", type=int, default=256, help="tokens")
    parser.add_argument("--batch-size", type=int, default=32, help="of sentence-transformers")
    parser.add_argument("--max-num-batched-tokens", type=int, default=2048)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    lengths = random.Random(0)
    letters = random.Random(1)
    texts = [
        "".join(letters.choices("abcdefghij klmnopqrst", k=lengths.randint(options.shortest, options.longest)))
        for _ in range(options.documents)
    ]
    with tempfile.TemporaryDirectory() as folder:
        compare(make_model(Path(folder), options.architecture), texts, options)


def make_model(folder: Path, architecture: str) -> Path:
    extra: dict[str, dict[str, Any]] = {
        "bert": {"intermediate_size": 1536, "pad_token_id": 0},
        "qwen3": {"intermediate_size": 1024},
    }
    return make_embedding_model(
        folder,
        "mean_tokens",
        normalize=True,
        hidden_size=384,
        architecture=architecture,
        auto_class="AutoModel",
        **SHAPE,
        **extra[architecture],
    )


def compare(folder: Path, texts: list[str], options: argparse.Namespace) -> None:
    from sentence_transformers import SentenceTransformer

    llm = LLM(str(folder), max_num_batched_tokens=options.max_num_batched_tokens, enable_prefix_caching=False)
    model = SentenceTransformer(str(folder), device="cpu")
    model.tokenizer.pad_token = "<|endoftext|>"

    def by_engine() -> torch.Tensor:
        return torch.tensor([output.outputs.embedding for output in llm.embed(texts, use_tqdm=False)])

    def by_library() -> torch.Tensor:
        return model.encode(texts, batch_size=options.batch_size, convert_to_tensor=True, show_progress_bar=False)

    runs: dict[str, Callable[[], torch.Tensor]] = {"LLM.embed": by_engine, "sentence-transformers": by_library}
    results = {name: run() for name, run in runs.items()}  # warm up
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(options.rounds):
        for name, run in runs.items():
            started = time.perf_counter()
            run()
            best[name] = min(best[name], time.perf_counter() - started)
    for name, seconds in best.items():
        print(f"{name:22} {len(texts) / seconds:8.1f} documents/s")
    cosine = torch.cosine_similarity(results["LLM.embed"], results["sentence-transformers"]).min().item()
    print(f"least cosine {cosine:.6f}, {torch.get_num_threads()} threads, {sum(map(len, texts))} tokens")


if __name__ == "__main__":
    main()
