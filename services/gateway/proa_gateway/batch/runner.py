"""Runs a batch: sends the lines that have no response yet, some at a time, and appends each response to the output."""

import asyncio
from collections.abc import Iterable, Iterator
from typing import BinaryIO

from proa_gateway.batch.client import BatchClient
from proa_gateway.batch.lines import (
    Answered,
    BatchRequest,
    LineError,
    error_line,
    num_output_tokens,
    read_requests,
    response_line,
)
from proa_gateway.batch.progress import Progress


async def run_batch(
    source: Iterable[bytes],
    output: BinaryIO,
    answered: Answered,
    client: BatchClient,
    progress: Progress,
    *,
    max_concurrency: int,
) -> None:
    """`source`: lines of the input. The output is in the order in which responses come. Raises `GatewayUnreachable`;
    the lines without a response are then not in the output."""
    requests = _unanswered(source, answered, progress)

    def append(line: bytes) -> None:
        output.write(line)
        output.flush()

    async def send_next() -> None:
        for request in requests:  # shared by all tasks
            if isinstance(request, LineError):
                append(error_line(request))
                progress.add(failed=True)
                await asyncio.sleep(0)  # a file may have many such lines
                continue
            response = await client.send(request)
            append(response_line(request, response))
            progress.add(failed=response.status != 200, num_tokens=num_output_tokens(response.body))

    showing = asyncio.create_task(progress.show_regularly())
    tasks = [asyncio.create_task(send_next()) for _ in range(max_concurrency)]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in (*tasks, showing):
            task.cancel()
        await asyncio.gather(*tasks, showing, return_exceptions=True)
        progress.show()


def _unanswered(source: Iterable[bytes], answered: Answered, progress: Progress) -> Iterator[BatchRequest | LineError]:
    for request in read_requests(source):
        if isinstance(request, LineError):
            is_answered = request.line in answered.lines
        else:
            is_answered = request.custom_id in answered.custom_ids
        if is_answered:
            progress.num_skipped += 1
        else:
            yield request
