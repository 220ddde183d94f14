"""What adapters cost on a CPU: decode steps without the flag, with it, and with adapters; steps while one is loaded.

Engines of one model with random weights take turns in one process, and the best round of each counts, to reduce the
effect of other processes. The adapters have rank 16 and all linear layers.

    PYTHONPATH=tests python -m benchmarks.engine.lora --rows 64 --layers 6
"""

import argparse
import json
import os
import platform
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from proa_engine import EngineConfig, LLMEngine, LoRARequest, SamplingParams
from proa_engine.core.operations import LoadLora
from support.shape_models import QWEN3_06B, make_shape_model

RANK = 16
NUM_ADAPTERS = 8
STEPS = 6  # of a round


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--load-megabytes", type=int, default=100)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fields = QWEN3_06B | {
            "num_hidden_layers": arguments.layers,
            "hidden_size": arguments.hidden,
            "intermediate_size": 3 * arguments.hidden,
            "num_attention_heads": arguments.hidden // 64,
            "num_key_value_heads": arguments.hidden // 128,
            "head_dim": 64,
            "vocab_size": 1024,
        }
        model = make_shape_model(folder, fields)
        adapters = [
            LoRARequest(f"a{index}", index, str(write_adapter(folder / f"a{index}", fields, RANK)))
            for index in range(NUM_ADAPTERS)
        ]
        result = decode_steps(model, adapters, arguments.rows, arguments.rounds)
        rank = min(256, RANK * arguments.load_megabytes * 2**20 // folder_bytes(folder / "a0"))
        large = write_adapter(folder / "large", fields, rank)
        result |= steps_while_loading(model, large, rank)
    print(
        json.dumps({"machine": platform.processor(), "threads": os.environ.get("OMP_NUM_THREADS")} | result, indent=1)
    )


def write_adapter(folder: Path, fields: Mapping[str, Any], rank: int) -> Path:
    hidden, inner, size = fields["hidden_size"], fields["intermediate_size"], fields["head_dim"]
    query, kv = fields["num_attention_heads"] * size, fields["num_key_value_heads"] * size
    attention = {"q_proj": (query, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, query)}
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    tensors = {}
    for layer in range(fields["num_hidden_layers"]):
        for part, modules in (("self_attn", attention), ("mlp", mlp)):
            for module, (outputs, inputs) in modules.items():
                prefix = f"base_model.model.model.layers.{layer}.{part}.{module}"
                tensors[f"{prefix}.lora_A.weight"] = torch.randn(rank, inputs) / 100
                tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, rank) / 100
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": rank}))
    return folder


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def engine(model: Path, **config: Any) -> LLMEngine:
    return LLMEngine(
        EngineConfig.from_options(
            model=str(model),
            load_format="dummy",
            skip_tokenizer_init=True,
            max_model_len=2048,
            kv_cache_memory_bytes=2**28,
            async_scheduling=False,  # the steps of an engine end in its own round
            **config,
        )
    )


class Decoding:
    """Requests that decode for ever, with these adapters in turn."""

    def __init__(self, engine: LLMEngine, rows: int, adapters: Sequence[LoRARequest]) -> None:
        self.engine = engine
        self.rows = rows
        engine.load_loras(adapters)
        params = SamplingParams(temperature=0.0, max_tokens=2000, ignore_eos=True, detokenize=False)
        for index in range(rows):
            adapter = adapters[index % len(adapters)] if adapters else None
            engine.add_request(str(index), {"prompt_token_ids": [1 + index, 2]}, params, lora_request=adapter)
        for _ in range(4):
            engine.step()

    def round(self) -> float:
        """Milliseconds of the processor that a step takes, of all threads."""
        started = time.process_time()
        for _ in range(STEPS):
            assert len(self.engine.step()) == self.rows
        return (time.process_time() - started) / STEPS * 1000


def decode_steps(model: Path, adapters: Sequence[LoRARequest], rows: int, rounds: int) -> dict[str, Any]:
    with_loras = {"enable_lora": True, "max_loras": NUM_ADAPTERS}
    cases = {
        "without flag": Decoding(engine(model), rows, ()),
        "no adapter": Decoding(engine(model, **with_loras), rows, ()),
        "one adapter": Decoding(engine(model, **with_loras), rows, adapters[:1]),
        f"{NUM_ADAPTERS} adapters": Decoding(engine(model, **with_loras), rows, adapters),
    }
    best = dict.fromkeys(cases, float("inf"))
    for _ in range(rounds):
        for name, decoding in cases.items():
            best[name] = min(best[name], decoding.round())
    for decoding in cases.values():
        decoding.engine.shutdown()
    plain = best["without flag"]
    return {"rows": rows} | {name: f"{ms:.2f} ms, {ms / plain - 1:+.1%}" for name, ms in best.items()}


def steps_while_loading(model: Path, adapter: Path, rank: int) -> dict[str, Any]:
    """The longest step with and without an adapter being read, and how long that takes."""
    decoding = Decoding(engine(model, enable_lora=True, max_lora_rank=rank), 8, ())
    usual = longest_step(decoding.engine, time.monotonic() + 3)
    done = decoding.engine._core.operate(LoadLora("large", str(adapter)))
    started, longest = time.monotonic(), 0.0
    while not done.done():
        longest = max(longest, longest_step(decoding.engine, 0))
    seconds = time.monotonic() - started
    done.result()
    decoding.engine.shutdown()
    return {
        "adapter": f"{folder_bytes(adapter) / 2**20:.0f} MiB, rank {rank}",
        "load": f"{seconds:.2f} s",
        "longest step": f"{longest * 1000:.1f} ms, without loading {usual * 1000:.1f} ms",
    }


def longest_step(engine: LLMEngine, until: float) -> float:
    longest = 0.0
    while True:
        started = time.perf_counter()
        engine.step()
        longest = max(longest, time.perf_counter() - started)
        if time.monotonic() > until:
            return longest


if __name__ == "__main__":
    main()
