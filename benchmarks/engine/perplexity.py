"""Perplexity of the built-in model in float32 and with fp8, on held-out documents.

PYTHONPATH=tests python -m benchmarks.engine.perplexity --conversations 400 --questions 200
"""

import argparse
from typing import Any

from proa_engine import LLM
from support.perplexity import perplexity, unseen_documents

VARIANTS: dict[str, dict[str, Any]] = {
    "as it is": {},
    "weights and activations in fp8": {"quantization": "fp8"},
    "KV cache in fp8": {"kv_cache_dtype": "fp8"},
    "both": {"quantization": "fp8", "kv_cache_dtype": "fp8"},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--conversations", type=int, default=400)
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--dtype", default="auto")
    arguments = parser.parse_args()
    documents = unseen_documents(arguments.conversations, arguments.questions)
    print(f"{sum(sum(marked) for _, marked in documents)} tokens of {len(documents)} documents")
    plain = 0.0
    for name, options in VARIANTS.items():
        llm = LLM("builtin", dtype=arguments.dtype, max_model_len=2048, num_gpu_blocks_override=2048, **options)
        value = perplexity(llm, documents)
        plain = plain or value
        print(f"{name:32} perplexity {value:.5f} ({value / plain - 1:+.3%})", flush=True)


if __name__ == "__main__":
    main()
