"""Requests whose outputs must be the same with every drafter, and engines' settings under which they must."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

from proa.contract import EngineCoreRequest, SamplingParams
from proa_engine.step.decode_graphs import graph_shapes
from proa_engine.worker.worker import Worker
from support.engine import Result, request, tokens
from support.runner import FakeCapture
from support.tiny_models import BYTES

BLOCK = 8
CONFIG: dict[str, Any] = {"max_model_len": 160, "block_size": BLOCK, "max_num_batched_tokens": 48, "block_seed": 4}
# K, asynchronous, prefix cache, blocks: all requests need some 400
SETTINGS = [
    (1, True, True, 2000),
    (3, True, True, 60),
    (5, False, True, 2000),
    (5, True, False, 60),
    (3, False, False, 2000),
]


def prompt(index: int) -> list[int]:
    """Prompts of up to 100 tokens. Three of four share their first tokens with others."""
    shared = [(index % 4) * 11 + place % 29 for place in range(40)]
    return shared[: 40 * (index % 4 > 0)] + [(index * 31 + place * 7) % BYTES for place in range(3 + 9 * (index % 7))]


def requests() -> list[EngineCoreRequest]:
    styles: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.7, "logprobs": 2},
        {"temperature": 1.0, "top_p": 0.9},
        {"temperature": 0.0, "repetition_penalty": 1.3, "prompt_logprobs": 1},
    ]
    return [
        request(
            str(index),
            prompt(index),
            SamplingParams(
                max_tokens=None if index % 9 == 8 else 20 + index % 5,
                key=index,
                ignore_eos=True,
                **styles[index % len(styles)],
            ),
        )
        for index in range(20)
    ]


def whole(results: Mapping[str, Result], wanted: Sequence[EngineCoreRequest]) -> dict[str, list[int]]:
    """Prompt and output of each request."""
    return {each.request_id: [*each.prompt_token_ids, *results[each.request_id].token_ids] for each in wanted}


def assert_same(actual: Mapping[str, Result], expected: Mapping[str, Result]) -> None:
    assert tokens(actual) == tokens(expected)
    for name, result in expected.items():
        assert actual[name].finish_reason is result.finish_reason
        assert [part.token_id for part in actual[name].logprobs] == [part.token_id for part in result.logprobs]
        assert len(actual[name].prompt_logprobs) == len(result.prompt_logprobs)


def settings_of(*, is_async: bool, has_hits: bool, num_blocks: int) -> dict[str, Any]:
    return {
        "async_scheduling": is_async,
        "enable_prefix_caching": has_hits,
        "num_gpu_blocks_override": num_blocks,
        "max_num_seqs": 12,
    }


@contextmanager
def replayed(num_drafts: int) -> Iterator[FakeCapture]:
    """Engines that are built meanwhile replay steps of decodes with up to four rows."""
    shapes, capture = graph_shapes(4, num_drafts), FakeCapture()
    with (
        mock.patch.object(Worker, "_graph_shapes", return_value=shapes),
        mock.patch.object(Worker, "_graph_capture", return_value=capture),
    ):
        yield capture
