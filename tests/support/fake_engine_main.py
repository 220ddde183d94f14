"""The fake engine as a program, for benchmarks (a CPU core of its own) and for tests that kill it."""

import argparse
import asyncio
import signal

from proa.engine.v1 import core_pb2
from support.fake_engine import EMBEDDING_SIZE, FakeEngine, say


async def serve(arguments: argparse.Namespace) -> None:
    stopped = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stopped.set)
    script = say(arguments.text, repeat=arguments.repeat)
    engine = FakeEngine(
        script=script,
        step_delay=arguments.step_delay,
        max_model_len=arguments.max_model_len,
        max_num_seqs=arguments.max_num_seqs,
        pooling_tasks=arguments.pooling_tasks,
        embedding_size=arguments.embedding_size,
        max_loras=arguments.max_loras,
    )
    await engine.start(arguments.port)
    await stopped.wait()
    await engine.stop()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--text", default="The quick brown fox jumps over the lazy dog. ")
    parser.add_argument("--repeat", action="store_true", help="repeat the text up to max_tokens")
    parser.add_argument("--step-delay", type=float, default=0.0, help="seconds before each step")
    parser.add_argument("--max-model-len", type=int, default=1_000_000)
    parser.add_argument("--max-num-seqs", type=int, default=256)
    parser.add_argument("--pooling-tasks", nargs="*", default=[], type=core_pb2.PoolingTask.Value)
    parser.add_argument("--embedding-size", type=int, default=EMBEDDING_SIZE)
    parser.add_argument("--max-loras", type=int, default=0)
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
