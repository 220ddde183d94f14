"""A client whose node loses power: the engine gets no FIN, and still aborts its requests."""

import time
from dataclasses import dataclass

import grpc

from proa.engine.v1 import service_pb2_grpc
from proa_engine.core.types import SchedulerOutput
from support.cable import Cable
from support.engine_client import SessionClient, wait_until
from support.engine_server import LoadedFakeExecutor, running_server


@dataclass
class SlowExecutor(LoadedFakeExecutor):
    """Steps of 50 ms, so that a request of 4000 tokens does not end by itself."""

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        time.sleep(0.05)
        super().execute_model(scheduler_output)


async def test_requests_of_a_dead_client_are_aborted() -> None:
    with running_server(SlowExecutor(num_blocks=2000, block_size=4, max_model_len=4096)) as server:
        stats = server.parts.core.stats
        async with Cable(f"127.0.0.1:{server.port}") as cable, grpc.aio.insecure_channel(cable.address) as channel:
            client = await SessionClient(service_pb2_grpc.EngineServiceStub(channel), deadline=100).open()
            await client.add(1, [1, 2, 3], max_tokens=4000)
            await wait_until(lambda: stats().num_running_reqs == 1)
            cable.cut()
            await wait_until(lambda: stats().num_running_reqs == 0, 20)
            cable.mend()
            client.call.cancel()
