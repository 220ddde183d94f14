"""Messages to an engine with keyword defaults, and a Session client for tests."""

import asyncio
from array import array
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from proa.contract import Audio, Image
from proa.contract.pb import to_pb
from proa.engine.v1 import core_pb2, service_pb2, service_pb2_grpc

DEADLINE = 30.0  # seconds; far more than any test takes on an idle machine


def engine_request(
    prompt: Sequence[int] = (1, 2, 3),
    *,
    request_id: str = "",
    lora_name: str = "",
    lora_digest: str = "",
    images: Sequence[Image] = (),
    audios: Sequence[Audio] = (),
    **params: Any,
) -> core_pb2.EngineCoreRequest:
    return core_pb2.EngineCoreRequest(
        request_id=request_id,
        lora_name=lora_name,
        lora_digest=lora_digest,
        images=[to_pb(core_pb2.Image, image) for image in images],
        audios=[to_pb(core_pb2.Audio, audio) for audio in audios],
        prompt_token_ids=array("I", prompt).tobytes(),
        sampling_params=core_pb2.SamplingParams(**{"max_tokens": 4, "ignore_eos": True} | params),
    )


def generate_request(prompt: Sequence[int] = (1, 2, 3), **kwargs: Any) -> service_pb2.GenerateRequest:
    return service_pb2.GenerateRequest(request=engine_request(prompt, **kwargs))


async def generate(stub: service_pb2_grpc.EngineServiceStub, *args: Any, **kwargs: Any) -> list[int]:
    """All tokens of one Generate call."""
    call = stub.Generate(generate_request(*args, **kwargs), timeout=DEADLINE)
    return [token_id async for response in call for token_id in response.output.new_token_ids]


async def wait_until(condition: Callable[[], object], seconds: float = DEADLINE) -> None:
    """Wait until the condition holds. Raises TimeoutError."""
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 - it happens on other threads
            await asyncio.sleep(0.005)


class SessionClient:
    """One Session. `read` collects tokens, final outputs and rejections by handle."""

    def __init__(self, stub: service_pb2_grpc.EngineServiceStub, *, deadline: float = DEADLINE) -> None:
        self.call = stub.Session(timeout=deadline)
        self.hello: service_pb2.Hello | None = None
        self.tokens: dict[int, list[int]] = {}  # by handle
        self.finished: dict[int, core_pb2.EngineCoreOutput] = {}
        self.rejected: dict[int, service_pb2.Rejected] = {}
        self.num_outputs = 0  # messages
        self.stats: core_pb2.SchedulerStats | None = None
        self.draining = False
        self.loras: list[service_pb2.Lora] = []  # of the last message

    async def open(self, client_id: str = "test") -> "SessionClient":
        await self.call.write(service_pb2.SessionRequest(open=service_pb2.OpenSession(client_id=client_id)))
        message = await self.call.read()
        assert message is not grpc.aio.EOF, await self.call.details()
        self.hello = message.hello
        self.loras = list(message.hello.loras.loras)
        return self

    async def add(self, handle: int, *args: Any, **kwargs: Any) -> None:
        request = engine_request(*args, **{"request_id": f"{id(self)}-{handle}"} | kwargs)
        await self.call.write(service_pb2.SessionRequest(add=service_pb2.AddRequest(handle=handle, request=request)))

    async def abort(self, *handles: int) -> None:
        await self.call.write(service_pb2.SessionRequest(abort=service_pb2.AbortHandles(handles=handles)))

    async def read(self) -> bool:
        """Take one message; False at the end of the stream. Raises `grpc.aio.AioRpcError`."""
        message = await self.call.read()
        if message is grpc.aio.EOF:
            return False
        match message.WhichOneof("message"):
            case "outputs":
                self._take(message.outputs)
            case "rejected":
                self.rejected[message.rejected.handle] = message.rejected
            case "draining":
                self.draining = True
            case "loras":
                self.loras = list(message.loras.loras)
        return True

    async def read_until_finished(self, *handles: int) -> None:
        while not all(handle in self.finished for handle in handles):
            assert await self.read(), "the session ended"

    def _take(self, outputs: core_pb2.EngineCoreOutputs) -> None:
        self.num_outputs += 1
        self.stats = outputs.stats
        columns = array("I", outputs.plain_handles), array("I", outputs.plain_token_ids)
        for handle, token_id in zip(*columns, strict=True):
            self.tokens.setdefault(handle, []).append(token_id)
        for output in outputs.outputs:
            self.tokens.setdefault(output.handle, []).extend(output.new_token_ids)
            if output.finish_reason:
                self.finished[output.handle] = output
