"""Messages on a worker's socket: encoded and decoded without change; a truncated frame is the end of the stream."""

import socket

import msgspec
import pytest

from proa.contract import EmbeddingType, PromptEmbeds, RepetitionDetectionParams, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.types import (
    CachedRequestData,
    CrossInput,
    EncodedAudio,
    EncoderInput,
    MediaSpan,
    NewRequestData,
    SchedulerOutput,
)
from proa_engine.framing import encode
from proa_engine.memory.kv_cache import CacheSizes, WorkerSizes
from proa_engine.option_groups import Parallel
from proa_engine.ranks import wire

SCHEDULER_OUTPUT = SchedulerOutput(
    step=9,
    new_requests=[
        NewRequestData(
            request_id="ü",
            token_ids=[1, 2**31],
            num_prompt_tokens=1,
            num_computed_tokens=0,
            block_ids=[[5], [-1, 6]],
            sampling_params=SamplingParams(
                key=2**64 - 1,
                logit_bias={7: -1.5},
                bad_words_token_ids=((1, 2), (3,)),
                stop_token_ids=(4,),
                logprobs=0,
                logprob_token_ids=(8, 9),
                repetition_detection=RepetitionDetectionParams(max_pattern_size=4, min_count=2),
            ),
            trace_headers={"traceparent": "00-1-2-01"},
            media=[MediaSpan(b"\xff\x00", 3, 6, (64, 96, 3))],
            audio=EncodedAudio((7, 8), 20),
            prompt_embeds=[PromptEmbeds(offset=9, num_tokens=1, type=EmbeddingType.BFLOAT16, values=b"\xff\x00")],
        )
    ],
    cached_requests=[CachedRequestData(request_id="b", num_computed_tokens=40, new_block_ids=[], new_token_ids=[3, 4])],
    decode_request_ids=["b"],
    num_chunk_tokens={"ü": 2},
    finished_request_ids=["c"],
    preempted_request_ids=[],
    freed_media=[b"\x80"],
    cross_inputs=[CrossInput([7, 8], 20, b"\xff\x00")],
    encoder_inputs=[EncoderInput(b"\xff\x00", (1, 2, 3), bytes(range(250, 256)))],
)
TO_WORKER: list[wire.ToWorker] = [
    wire.Init(
        EngineConfig(model="m", parallel=Parallel(tensor_parallel_size=2, worker_sockets=("/1.sock",))),
        2**62,
        "10.0.0.1",
        4711,
    ),
    wire.Start(CacheSizes(12, 3, 2)),
    wire.Step(SCHEDULER_OUTPUT),
    wire.Shutdown(),
]
TO_ENGINE: list[wire.ToEngine] = [
    wire.Ready(3, WorkerSizes(CacheSizes(12, 3, 2), 2, 3, (0, 1))),
    wire.Started(),
    wire.Failed("no memory"),
]


def test_messages_are_decoded_as_they_were_encoded() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        for message in TO_WORKER:
            ours.sendall(encode(message))
        for answer in TO_ENGINE:
            theirs.sendall(encode(answer))
        at_worker, at_engine = wire.worker_reader(theirs), wire.engine_reader(ours)
        assert [at_worker.read() for _ in TO_WORKER] == TO_WORKER
        assert [at_engine.read() for _ in TO_ENGINE] == TO_ENGINE


@pytest.mark.parametrize("kept", [0, 2, 10])
def test_end_of_stream_is_none_even_within_a_frame(kept: int) -> None:
    ours, theirs = socket.socketpair()
    with theirs:
        ours.sendall(encode(wire.Start(CacheSizes(1, 0, 2)))[:kept])
        ours.close()
        assert wire.worker_reader(theirs).read() is None


def test_a_message_of_the_wrong_direction_is_rejected() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.sendall(encode(wire.Started()))
        with pytest.raises(msgspec.ValidationError):
            wire.worker_reader(theirs).read()
