"""CPU time on the host of a step of plain decodes, by part, with a device that costs nothing.

    PYTHONPATH=tests python -m benchmarks.engine.host_step

core: schedule and update. inputs: the worker's arrays and its results (`InputBuilder`, `collect`).
wire: the server, from a step's outputs to its message in bytes. text: the gateway, from these to SSE events. One thread
does all; wire and text each include a turn of the event loop. Medians in milliseconds.
"""

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import tokenizers
import torch
from prometheus_client import CollectorRegistry
from torch import Tensor

import proa_engine
from proa.contract import EngineCoreRequest, SamplingParams
from proa.engine.v1 import service_pb2
from proa.text import TextStream, Vocabulary
from proa_engine.config import EngineConfig
from proa_engine.core.engine_core import EngineCore
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.timing.step_costs import StepCosts
from proa_engine.core.types import ModelRunnerOutput, SchedulerOutput
from proa_engine.engine_parts import assemble_engine
from proa_engine.executor.started import StartedRanks
from proa_engine.observability.metrics import EngineMetrics
from proa_engine.observability.telemetry import NoEngineTracer
from proa_engine.server.loaded_engine import LoadedEngine, RequestObserver, make_model_info
from proa_engine.server.request_router import RequestRouter
from proa_engine.server.session import Session as EngineSession
from proa_engine.step.async_output import StepTensors, collect
from proa_engine.step.decode_graphs import DecodeGraphs, Graph, graph_shapes
from proa_engine.step.prompt_graphs import PromptGraphs
from proa_engine.step.step_inputs import InputBuilder, StepInputs
from proa_gateway.apis.chat.render import ChatChoice
from proa_gateway.engines.engine_loras import EngineLoras
from proa_gateway.engines.session import Session as GatewaySession
from proa_gateway.http.streaming import ResponseWriter
from proa_gateway.output.text import OutputProcessor
from proa_gateway.serving.choices import ChoiceStream
from proa_gateway.serving.envelope import Envelope
from support.chat_forms import plain_form
from support.fake_executor import FakeModelConfig
from support.runner import make_batch

PARTS = ("core", "inputs", "wire", "text")
TOKENIZER = Path(proa_engine.__file__).parent / "builtin/model/tokenizer.json"


class NoCapture:
    def capture(self, first: Callable[[], Tensor], *others: Callable[[Tensor], Tensor]) -> list[Graph]:
        return [Graph(lambda: None, torch.empty(0))]


class HostExecutor:
    """Does a worker's host work and samples the same token for every row. `seconds` is its CPU time so far."""

    failure: str | None = None

    def __init__(self, config: EngineConfig, token_id: int) -> None:
        self.seconds = 0.0
        self.started = StartedRanks(
            description="host",
            model_config=FakeModelConfig(151_936),
            max_model_len=4096,
            max_num_seqs=config.max_num_seqs,
            eos_token_ids=frozenset({151_645}),
            cache_groups=CacheGroups(num_blocks=40_000, block_size=16),
            step_costs=StepCosts(),
        )
        self._token_ids = torch.full((config.max_num_seqs,), token_id)
        graphs = DecodeGraphs(graph_shapes(config.max_num_seqs), torch.device("cpu"))
        graphs.capture(lambda rows, _: rows, NoCapture())
        batch = make_batch(
            max_num_seqs=config.max_num_seqs,
            max_model_len=self.started.max_model_len,
            block_size=config.block_size,
            vocab_size=self.started.model_config.vocab_size,
        )
        self._builder = InputBuilder(batch, graphs, PromptGraphs((), batch.tables))

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        started = time.thread_time()
        inputs = self._builder.build(scheduler_output)
        assert inputs is not None
        self._inputs = inputs
        self.seconds += time.thread_time() - started

    def draft_tokens(self) -> dict[int, list[int]]:
        return {}

    def sample_tokens(self, masks: GrammarMasks | None = None) -> "HostFuture":
        return HostFuture(self, self._inputs, self._token_ids[: len(self._inputs.request_ids)])

    def sleep(self, level: int) -> None: ...

    def wake_up(self) -> None: ...

    def shutdown(self) -> None: ...

    def fail(self, reason: str) -> None: ...

    def make_host_buffer(self, num_bytes: int) -> memoryview:
        return memoryview(bytearray(num_bytes))


@dataclass
class HostFuture:
    executor: HostExecutor
    inputs: StepInputs
    token_ids: Tensor

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        started = time.thread_time()
        output = collect(StepTensors(self.token_ids), self.inputs)
        self.executor.seconds += time.thread_time() - started
        return output


@dataclass
class Cable:
    """A session's stream, as bytes to the gateway. Notes when a message was sent and when it was delivered."""

    to_engine: asyncio.Queue[Any] = field(default_factory=asyncio.Queue)
    to_gateway: asyncio.Queue[bytes] = field(default_factory=asyncio.Queue)
    sent_at: float = 0.0
    delivered_at: float = 0.0

    async def messages(self) -> AsyncIterator[service_pb2.SessionRequest]:
        yield service_pb2.SessionRequest(open=service_pb2.OpenSession())
        while True:
            yield await self.to_engine.get()

    async def send(self, message: service_pb2.SessionResponse) -> None:
        self.to_gateway.put_nowait(message.SerializeToString())
        self.sent_at = time.thread_time()

    async def write(self, message: service_pb2.SessionRequest) -> None:
        self.to_engine.put_nowait(message)

    async def read(self) -> service_pb2.SessionResponse:
        """Called when the message before has been delivered."""
        self.delivered_at = time.thread_time()
        return service_pb2.SessionResponse.FromString(await self.to_gateway.get())


class Listener:
    def ignore(self, *_: object, **__: object) -> None: ...

    started = ended = draining = failed = on_stats = on_draining = on_success = on_failure = ignore


class Client:
    """Streams chat completions and counts their events. The `Connection` of all of them, and its transport."""

    def __init__(self, session: GatewaySession, vocabulary: Vocabulary) -> None:
        self.num_events = 0
        self.transport = self
        self.writer: ResponseWriter | None = None
        self._session = session
        self._vocabulary = vocabulary

    async def add(self, index: int, max_tokens: int) -> None:
        writer = ResponseWriter(self._send, self)
        await writer.start_events()
        envelope = Envelope(id="chatcmpl-1", object="chat.completion.chunk", created=0, model="m")
        choice = ChatChoice(plain_form(envelope), 0, {})
        sink = ChoiceStream(None, choice, writer, on_blocked=lambda: None)
        request = EngineCoreRequest(
            request_id=f"chatcmpl-{index}",
            prompt_token_ids=list(range(index, index + 20 + index % 16)),  # so that every step fills blocks
            sampling_params=SamplingParams(max_tokens=max_tokens, temperature=0.6, key=index),
            arrival_time=1.0,
        )
        stream = TextStream(self._vocabulary)
        self._session.submit(request, OutputProcessor(stream, sink, Listener(), wants_tokens=False))

    def write(self, data: bytes) -> None:
        self.num_events += 1

    async def _send(self, message: Any) -> None: ...


async def measure(num_requests: int, num_steps: int) -> list[list[float]]:
    """CPU seconds of each step, by part."""
    tokenizer = tokenizers.Tokenizer.from_file(str(TOKENIZER))
    config = EngineConfig(model="m", max_num_seqs=num_requests)
    executor = HostExecutor(config, tokenizer.encode(" and").ids[0])
    parts = assemble_engine(config, executor, None)
    metrics = EngineMetrics(
        CollectorRegistry(),
        config,
        cache_groups=executor.started.cache_groups,
        max_model_len=parts.limits.lengths.max_model_len,
    )
    observer, info = RequestObserver(NoEngineTracer(), metrics), make_model_info(parts, tokenizer_digest="")
    router, cable = RequestRouter(), Cable()
    router.start(LoadedEngine(parts.core, info, config, (), lambda request: None, observer))
    loras = EngineLoras("", lambda lora, model: None)
    session = GatewaySession(cable, Listener(), loras, heartbeat=3600.0)  # type: ignore[arg-type]
    client = Client(session, Vocabulary(tokenizer))
    engine = asyncio.create_task(EngineSession(router, lambda: None).run(cable.messages(), cable.send))
    gateway = asyncio.create_task(session.run())
    for index in range(num_requests):
        await client.add(index, num_steps + 100)
    while parts.core.stats().num_running_reqs < num_requests:
        await asyncio.sleep(0.001)
        await step(parts.core, executor, router, cable)
    for _ in range(20):
        await step(parts.core, executor, router, cable)
    gc.collect()
    gc.freeze()
    num_before = client.num_events
    costs = [await step(parts.core, executor, router, cable) for _ in range(num_steps)]
    assert client.num_events - num_before == num_requests * num_steps
    engine.cancel()
    gateway.cancel()
    await asyncio.gather(engine, gateway, return_exceptions=True)
    return costs


async def step(core: EngineCore, executor: HostExecutor, router: RequestRouter, cable: Cable) -> list[float]:
    """Run a step until its events are written. Returns CPU seconds by part."""
    executor.seconds = 0.0
    started = time.thread_time()
    outputs = core.step()
    stepped = time.thread_time()
    if outputs is not None:
        router.deliver(outputs)
        while cable.delivered_at < stepped:  # noqa: ASYNC110
            await asyncio.sleep(0)
    on_device = executor.seconds
    return [stepped - started - on_device, on_device, cable.sent_at - stepped, cable.delivered_at - cable.sent_at]


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--steps", type=int, default=500)
    arguments = parser.parse_args(argv)
    print(f"{'requests':>8}" + "".join(f"{name:>8}" for name in (*PARTS, "engine", "total")))
    for num_requests in arguments.requests:
        costs = asyncio.run(measure(num_requests, arguments.steps))
        medians = [statistics.median(part) * 1e3 for part in zip(*costs, strict=True)]
        figures = [*medians, sum(medians[:-1]), sum(medians)]
        print(f"{num_requests:>8}" + "".join(f"{figure:8.3f}" for figure in figures), flush=True)


if __name__ == "__main__":
    main()
