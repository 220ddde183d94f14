"""Whole engines that replay decodes and prompts, on a CPU with graphs that run their functions again."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from proa.contract import SamplingParams
from proa_engine.step.decode_graphs import graph_shapes
from proa_engine.step.prompt_graphs import PromptGraphs, PromptShape
from proa_engine.worker.worker import Worker
from support.engine import Engine, build_core, request, run, tokens
from support.runner import FakeCapture
from support.tiny_models import BYTES, make_tiny_model

CONFIG: dict[str, Any] = {"max_model_len": 128, "block_size": 8, "max_num_batched_tokens": 64, "block_seed": 4}
PLAIN: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.8},
    {"temperature": 0.9, "top_k": 30, "top_p": 0.9},
    {"temperature": 1.1, "min_p": 0.02},
]
OTHER: dict[str, Any] = {"temperature": 0.7, "repetition_penalty": 1.2, "logprobs": 1}


PROMPTS = [PromptShape(*sizes) for sizes in ((16, 0, 4), (48, 0, 6), (48, 24, 6))]


@contextmanager
def replaying(folder: Path, prompts: Sequence[PromptShape], **settings: Any) -> Iterator[tuple[Engine, FakeCapture]]:
    capture = FakeCapture()
    with (
        mock.patch.object(Worker, "_graph_shapes", return_value=graph_shapes(8)),
        mock.patch.object(Worker, "_prompt_shapes", return_value=prompts),
        mock.patch.object(Worker, "_graph_capture", return_value=capture),
        build_core(folder, poison=True, **CONFIG | settings) as engine,
    ):
        yield engine, capture


def test_engines_that_sample_in_graphs_generate_the_same_tokens(tmp_path: Path) -> None:
    """Requests come and go, so slots are reused; a few blocks are preempted; some steps are not plain."""
    folder = make_tiny_model(tmp_path, "qwen3", seed=8)
    wanted = [
        request(
            str(index),
            [(index * 31 + place * 7) % BYTES for place in range(3 + 4 * (index % 5))],
            SamplingParams(
                max_tokens=12 + index, key=index, ignore_eos=True, **(OTHER if index == 9 else PLAIN[index % 4])
            ),
        )
        for index in range(12)
    ]
    with build_core(folder, **CONFIG) as engine:
        expected = tokens(run(engine, wanted))
    for async_scheduling, num_blocks in ((True, 2000), (True, 24), (False, 2000)):
        settings = {"async_scheduling": async_scheduling, "num_gpu_blocks_override": num_blocks}
        with replaying(folder, (), **settings) as (engine, capture):
            assert tokens(run(engine, wanted)) == expected
            assert (engine.core.stats().num_preemptions > 0) == (num_blocks == 24)
            assert 0 < capture.num_draws < capture.num_replays


@pytest.mark.parametrize("family", ["qwen3", "gemma3_text", "gpt_oss"])
def test_engines_that_replay_prompts_generate_the_same_tokens(family: str, tmp_path: Path) -> None:
    """Prompts join decodes, some too many or too long for a graph; rows need the logits of several of their tokens."""
    folder = make_tiny_model(tmp_path, family, seed=8)
    wanted = [
        request(
            str(index),
            [(index * 31 + place * 7) % BYTES for place in range(2 + 5 * (index % 8))],
            SamplingParams(
                max_tokens=3 + 5 * (index % 3),
                key=index,
                ignore_eos=True,
                **(OTHER | {"prompt_logprobs": 2} if index == 9 else PLAIN[index % 4]),
            ),
        )
        for index in range(20)
    ]
    parts = [wanted[:1], wanted[1:3], wanted[3:4], wanted[4:]]
    with build_core(folder, **CONFIG) as engine:
        expected = [tokens(run(engine, part)) for part in parts]
    for num_blocks in (2000, 32):
        with (
            replaying(folder, PROMPTS, num_gpu_blocks_override=num_blocks) as (engine, _),
            mock.patch.object(PromptGraphs, "replay", autospec=True, side_effect=PromptGraphs.replay) as replay,
        ):
            assert [tokens(run(engine, part)) for part in parts] == expected
        assert {call.args[1] for call in replay.call_args_list} == set(PROMPTS)
