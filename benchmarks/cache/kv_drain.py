"""Move running requests from one engine to another, as a gateway does when an engine drains: how many tokens are
computed again, and how long it takes.

    python -m benchmarks.cache.kv_drain
    python -m benchmarks.cache.kv_drain --requests 16 --tokens 2048 --without-source

Two engines in this process, over a small model with random weights. The first one runs all requests, each with a
prompt of its own, until each has generated a random number of tokens. Then they are aborted there, and sent to the
second one with these tokens and with the first one as source of their blocks.
"""

import argparse
import json
import random
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.real_shapes import SHAPES
from proa.contract import EngineCoreRequest, KvSource, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.types import StepOutputs
from proa_engine.engine_parts import EngineParts, load_engine
from proa_engine.option_groups import KvTiers

BLOCK_SIZE = 16
MODEL = SHAPES["Qwen3-0.6B"] | {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "torch_dtype": "float32",
    "eos_token_id": 511,
}
MAX_GENERATED = 64  # before the move
PARAMS = SamplingParams(temperature=0.0, max_tokens=2 * MAX_GENERATED, ignore_eos=True)


class Streams:
    """Requests by id, and the tokens that they have so far."""

    def __init__(self, requests: Sequence[EngineCoreRequest]) -> None:
        self.requests = {request.request_id: request for request in requests}
        self.generated: dict[str, list[int]] = {request_id: [] for request_id in self.requests}
        self.cached: dict[str, int] = {}  # tokens of the prefix cache, by request that has a token

    def take(self, outputs: StepOutputs | None) -> None:
        if outputs is None:
            return
        assert not outputs.rejections, outputs.rejections
        for request_id, token_id in zip(outputs.plain.request_ids, outputs.plain.token_ids, strict=True):
            self.generated[request_id].append(token_id)
        for output in outputs.outputs:
            self.generated[output.request_id] += output.new_token_ids
            if output.num_cached_tokens is not None:
                self.cached.setdefault(output.request_id, output.num_cached_tokens)


def make_requests(count: int, num_tokens: int, seed: int) -> list[EngineCoreRequest]:
    rows = random.Random(seed)
    lengths = [num_tokens - MAX_GENERATED - rows.randrange(BLOCK_SIZE) for _ in range(count)]
    prompts = [rows.choices(range(MODEL["vocab_size"] - 1), k=length) for length in lengths]
    return [
        EngineCoreRequest(
            request_id=f"{index}", prompt_token_ids=prompt, sampling_params=PARAMS, arrival_time=time.time()
        )
        for index, prompt in enumerate(prompts)
    ]


def run_until_generated(core: EngineCore, streams: Streams, num_tokens: int) -> None:
    for request in streams.requests.values():
        core.submit(request)
    while min(map(len, streams.generated.values())) < num_tokens:
        core.wait_for_work()
        streams.take(core.step())


def end(core: EngineCore, streams: Streams) -> None:
    """Abort all requests, and run the steps that store what is left."""
    core.abort(streams.requests)
    while core.has_unfinished_requests() or core.has_work():
        core.step()


def move(core: EngineCore, streams: Streams, source: KvSource | None) -> tuple[Streams, float]:
    """Run the requests on this engine until each has one more token. Returns the streams and the seconds."""
    moved = Streams(
        [
            replace(request, resumed_token_ids=streams.generated[request_id], kv_source=source)
            for request_id, request in streams.requests.items()
        ]
    )
    began = time.perf_counter()
    run_until_generated(core, moved, 1)
    return moved, time.perf_counter() - began


def engines(folder: Path, num_requests: int, num_tokens: int) -> tuple[EngineParts, EngineParts]:
    (folder / "config.json").write_text(json.dumps(MODEL))
    config = EngineConfig(
        model=str(folder),
        load_format="dummy",
        skip_tokenizer_init=True,
        max_model_len=num_tokens + 2 * MAX_GENERATED,
        max_num_seqs=num_requests,
        block_size=BLOCK_SIZE,
        num_gpu_blocks_override=num_requests * (num_tokens // BLOCK_SIZE + 2),
        kv_tiers=KvTiers(
            kv_offloading_size=1.5 * num_requests * num_tokens * 256 / 2**30, kv_transfer_address="127.0.0.1:0"
        ),
    )
    return load_engine(config, print), load_engine(config, print)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=8192, help="of each request when it is moved, about")
    parser.add_argument("--without-source", action="store_true", help="the second engine computes everything")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as directory:
        first, second = engines(Path(directory), arguments.requests, arguments.tokens)
        try:
            transfer = first.executor.started.kv_transfer
            assert transfer is not None
            source = KvSource(addresses=tuple(f"127.0.0.1:{port}" for port in transfer.ports))
            streams = Streams(make_requests(arguments.requests, arguments.tokens, arguments.seed))
            began = time.perf_counter()
            run_until_generated(first.core, streams, MAX_GENERATED // 2)
            first_seconds = time.perf_counter() - began
            end(first.core, streams)
            moved, seconds = move(second.core, streams, None if arguments.without_source else source)
        finally:
            first.shutdown()
            second.shutdown()
    lengths = {
        request_id: len(request.prompt_token_ids) + len(streams.generated[request_id])
        for request_id, request in streams.requests.items()
    }
    again = sum(length - moved.cached[request_id] for request_id, length in lengths.items())
    print(
        json.dumps(
            {
                "requests": len(lengths),
                "tokens": sum(lengths.values()),
                "computed_again": again,
                "computed_again_share": round(again / sum(lengths.values()), 4),
                "first_engine_seconds": round(first_seconds, 1),
                "move_seconds": round(seconds, 1),
            }
        )
    )


if __name__ == "__main__":
    main()
