"""The command `run-batch`: one run, from the files to the exit status."""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from typing import BinaryIO

import uvloop

from proa_gateway.batch.client import GatewayUnreachable, batch_client
from proa_gateway.batch.config import BatchConfig
from proa_gateway.batch.lines import Answered
from proa_gateway.batch.local_gateway import local_gateway
from proa_gateway.batch.output_file import open_output
from proa_gateway.batch.progress import Progress
from proa_gateway.batch.runner import run_batch
from proa_gateway.config import GatewayConfig

INTERRUPTED = 130  # the exit status of a program that SIGINT ended


def run(config: BatchConfig) -> int:
    """The exit status: 0 if all lines in the output have status 200, else 1. Raises `OSError` or `ValueError` for files
    that cannot be used."""
    with config.input_file.open("rb") as source, open_output(config.output_file) as (output, answered):
        return uvloop.run(_run(config, source, output, answered))


async def _run(config: BatchConfig, source: Iterable[bytes], output: BinaryIO, answered: Answered) -> int:
    progress = Progress()
    try:
        async with _gateway(config) as url:
            _cancel_on_signals()  # after the gateway in this process, which has handlers too
            api_key = config.api_key or os.environ.get("PROA_API_KEY")
            async with batch_client(url, api_key, config.max_concurrency) as client:
                await run_batch(source, output, answered, client, progress, max_concurrency=config.max_concurrency)
    except GatewayUnreachable as error:
        print(f"The gateway cannot be reached: {error}. Run the command again to continue.", file=sys.stderr)
        return 1
    except asyncio.CancelledError:
        print("Interrupted. Run the command again to continue.", file=sys.stderr)
        return INTERRUPTED
    return 1 if answered.num_failed + progress.num_failed else 0


@asynccontextmanager
async def _gateway(config: BatchConfig) -> AsyncIterator[str]:
    """The URL of the gateway."""
    if config.url is not None:
        yield config.url
        return
    async with local_gateway(GatewayConfig(engines=config.engines, tokenizer=config.tokenizer)) as url:
        yield url


def _cancel_on_signals() -> None:
    task = asyncio.current_task()
    assert task is not None
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
