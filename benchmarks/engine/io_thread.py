"""CPU time of the I/O thread per step, with an instant device, 256 requests and a gateway that reads every message.

    PYTHONPATH=tests python -m benchmarks.engine.io_thread

The same core is stepped without a server, in a server that drops the outputs, and in a server with one Session that has
all requests and is read by another process. Prints steps per second and each thread's CPU time per step.
"""

import argparse
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.timing.step_costs import StepCosts
from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput
from proa_engine.engine_parts import EngineParts, assemble_engine
from proa_engine.executor.started import StartedRanks
from proa_engine.server.options import ServeOptions
from proa_engine.server.serve import EngineServer
from support.fake_executor import FakeModelConfig

NUM_REQUESTS = 256
MAX_MODEL_LEN = 1 << 20


@dataclass
class InstantFuture:
    output: ModelRunnerOutput

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        return self.output


class InstantExecutor:
    """Samples the same token for every row."""

    started = StartedRanks(
        description="instant",
        model_config=FakeModelConfig(1000),
        max_model_len=MAX_MODEL_LEN,
        max_num_seqs=NUM_REQUESTS,
        eos_token_ids=frozenset(),
        cache_groups=CacheGroups(num_blocks=1 << 16, block_size=16),
        step_costs=StepCosts(),
    )
    failure: str | None = None

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        self._num_rows = len(scheduler_output.num_scheduled_tokens)

    def draft_tokens(self) -> dict[int, list[int]]:
        return {}

    def sample_tokens(self, masks: GrammarMasks | None = None) -> InstantFuture:
        return InstantFuture(ModelRunnerOutput(plain_token_ids=[7] * self._num_rows))

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def shutdown(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def make_host_buffer(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))


def make_parts() -> EngineParts:
    config = EngineConfig(model="none", enable_prefix_caching=False, max_num_seqs=NUM_REQUESTS)
    return assemble_engine(config, InstantExecutor(), None)


def submit_all(parts: EngineParts) -> None:
    for index in range(NUM_REQUESTS):
        params = SamplingParams(max_tokens=None, ignore_eos=True, temperature=0, key=0)
        parts.core.submit(
            EngineCoreRequest(request_id=str(index), prompt_token_ids=[1], sampling_params=params, arrival_time=0.0)
        )


def alone(seconds: float) -> dict[str, float]:
    """Step the core without a server."""
    parts = make_parts()
    submit_all(parts)
    for _ in range(100):
        parts.core.step()
    steps, cpu, deadline = 0, time.thread_time(), time.monotonic() + seconds
    while time.monotonic() < deadline:
        parts.core.step()
        steps += 1
    return {"steps/s": steps / seconds, "main µs": (time.thread_time() - cpu) / steps * 1e6}


def served(seconds: float, *, with_session: bool) -> dict[str, float]:
    """Step the core in a server, with the requests of one Session or of no client."""
    parts = make_parts()
    options = ServeOptions(config=parts.config, host="127.0.0.1", port=0, metrics_port=0)
    server = EngineServer(options, load=lambda *_: parts)
    clocks: dict[str, int] = {}

    def run() -> None:
        clocks["main"] = time.pthread_getcpuclockid(threading.get_ident())
        server.run()

    port = server.start()
    main = threading.Thread(target=run, daemon=True)
    main.start()
    io = next(thread for thread in threading.enumerate() if thread.name == "proa-io")
    clocks["io"] = time.pthread_getcpuclockid(io.ident or 0)
    reader = None
    if with_session:
        reader = subprocess.Popen([sys.executable, "-m", "benchmarks.engine.io_thread", "--read", str(port)])
        while parts.core.stats().num_running_reqs < NUM_REQUESTS:
            time.sleep(0.05)
    else:
        time.sleep(0.5)
        submit_all(parts)
    time.sleep(1.0)
    before = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    first, started = parts.core._num_steps, time.monotonic()
    time.sleep(seconds)
    steps, elapsed = parts.core._num_steps - first, time.monotonic() - started
    after = {name: time.clock_gettime(clock) for name, clock in clocks.items()}
    if reader is not None:
        reader.kill()
        reader.wait()
    return {"steps/s": steps / elapsed} | {f"{name} µs": (after[name] - before[name]) / steps * 1e6 for name in clocks}


async def read(port: int) -> None:
    """Be a gateway that parses every message and discards it."""
    import grpc

    from proa.engine.v1 import service_pb2, service_pb2_grpc
    from support.engine_client import engine_request

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = service_pb2_grpc.EngineServiceStub(channel).Session(wait_for_ready=True)
        await call.write(service_pb2.SessionRequest(open=service_pb2.OpenSession()))
        for handle in range(1, NUM_REQUESTS + 1):
            request = engine_request([1], request_id=str(handle), max_tokens=MAX_MODEL_LEN)
            add = service_pb2.AddRequest(handle=handle, request=request)
            await call.write(service_pb2.SessionRequest(add=add))
        while await call.read() is not grpc.aio.EOF:
            pass


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each measurement")
    parser.add_argument("--read", type=int, metavar="PORT", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.read:
        import asyncio

        asyncio.run(read(arguments.read))
        return
    for name, figures in (
        ("core alone", alone(arguments.seconds)),
        ("server, outputs dropped", served(arguments.seconds, with_session=False)),
        ("server, one session", served(arguments.seconds, with_session=True)),
    ):
        print(f"{name:28}" + "".join(f"  {key} {value:8.0f}" for key, value in figures.items()), flush=True)


if __name__ == "__main__":
    main()
