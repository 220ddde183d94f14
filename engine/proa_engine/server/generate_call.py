"""GenerateCall: the output stream of one Generate call. Outputs merge while the caller does not read."""

import asyncio
from collections.abc import AsyncIterator, Sequence

from proa.contract import EngineCoreOutput, EngineCoreRequest, LoadedLoras
from proa_engine.core.types import PlainTokens
from proa_engine.server.errors import EngineError
from proa_engine.server.pending import merge_output
from proa_engine.server.request_router import RequestRouter


class GenerateCall:
    """An output stream with a single request, which is aborted if the `async with` block ends before it does."""

    def __init__(self, router: RequestRouter) -> None:
        self._router = router
        self._stream_id = router.add_stream(self)
        self._pending: EngineCoreOutput | None = None
        self._last = EngineCoreOutput()  # not plain: it has the request's id and counts
        self._error: EngineError | None = None
        self._wake = asyncio.Event()

    def submit(self, request: EngineCoreRequest) -> None:
        """Raises EngineError."""
        self._router.submit(self._stream_id, request)

    async def outputs(self) -> AsyncIterator[EngineCoreOutput]:
        """Yield outputs as they come, those merged that came meanwhile. Raises EngineError."""
        is_finished = False
        while not is_finished:
            while self._pending is None:
                if self._error is not None:
                    raise self._error
                self._wake.clear()
                await self._wake.wait()
            output, self._pending = self._pending, None
            is_finished = output.is_finished
            yield output

    async def __aenter__(self) -> "GenerateCall":
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        self._router.remove_stream(self._stream_id)

    def deliver(self, outputs: Sequence[EngineCoreOutput], timestamp: float, step: int) -> None:
        for output in outputs:
            self._last = output
            self._add(output)

    def deliver_plain(self, tokens: PlainTokens, timestamp: float, step: int) -> None:
        last = self._last
        self._add(
            EngineCoreOutput(
                request_id=last.request_id,
                new_token_ids=tokens.token_ids,
                num_prompt_tokens=last.num_prompt_tokens,
                num_cached_tokens=last.num_cached_tokens,
            )
        )

    def reject(self, request_id: str, error: EngineError) -> None:
        self.fail(error)

    def load_changed(self) -> None:
        """Nothing to do: the output has no statistics."""

    def loras_changed(self, loaded: LoadedLoras) -> None:
        """Nothing to do: the request keeps its adapter."""

    def drain(self) -> None:
        """Nothing to do: the request runs to its end."""

    def fail(self, error: EngineError) -> None:
        self._error = error
        self._wake.set()

    def _add(self, output: EngineCoreOutput) -> None:
        if self._pending is None:
            self._pending = output
        else:
            merge_output(self._pending, output)
        self._wake.set()
