"""Encoded images: kept by hash until they are freed, in the order of the plans, and shared by ranks."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from queue import Queue
from typing import Any

import msgspec
import pytest
import torch
from torch import Tensor

from proa.contract import SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.framing import encode
from proa_engine.layers.parallel import ParallelContext
from proa_engine.memory.kv_cache import cpu_encoder_bytes, encoder_cache_bytes, image_of, most_image_tokens
from proa_engine.models.pooling_config import PoolingConfig
from proa_engine.option_groups import ImageOptions
from proa_engine.ranks import wire
from proa_engine.step.media import IMAGE_DIMS, EncoderWork, MediaEncodings, MediaPart, PixelEncoder, for_rank
from proa_engine.worker.warmup import WarmUp
from support.images import UNIT, WIDTH, FakeEncoder, encoder_input, image_config, span, with_images
from support.runner import BLOCK_SIZE, VOCAB_SIZE, FakeModel, RunnerHarness

GREEDY = SamplingParams(temperature=0)
CPU = torch.device("cpu")
IMAGES = [span(0, 1, columns, bytes([columns])) for columns in (1, 2, 3)]
INPUTS = [encoder_input(image, image.hash[0]) for image in IMAGES]


class FakeParallel(ParallelContext):
    """One of two ranks in threads of one process. `queues`: what each rank receives."""

    def __init__(self, rank: int, queues: list["Queue[Tensor]"]) -> None:
        super().__init__(rank, 2)
        object.__setattr__(self, "queues", queues)

    def broadcast(self, x: Tensor, source: int = 0) -> Tensor:
        queues: list[Queue[Tensor]] = self.__dict__["queues"]
        if self.rank != source:
            return x.copy_(queues[self.rank].get(timeout=60))
        queues[1 - self.rank].put(x.clone())
        return x


def make_encodings(parallel: ParallelContext | None = None) -> tuple[MediaEncodings, FakeEncoder]:
    encoder = FakeEncoder()
    encoders = {IMAGE_DIMS: PixelEncoder(encoder, image_config())}
    return MediaEncodings(encoders, torch.float32, CPU, parallel or ParallelContext()), encoder


def embeddings(encodings: MediaEncodings, *parts: MediaPart) -> Tensor:
    return encodings.embeddings(parts)


def test_parts_are_concatenated_in_order() -> None:
    encodings, _ = make_encodings()
    encodings.update(EncoderWork([], INPUTS))
    rows = embeddings(encodings, MediaPart(IMAGES[2].hash, 1, 3), MediaPart(IMAGES[0].hash, 0, 1))
    assert rows.tolist() == [[3, 3, 3, 0, 1, 2], [3, 3, 3, 0, 2, 2], [1, 1, 1, 0, 0, 0]]


def test_a_freed_image_is_forgotten_and_may_be_encoded_again_in_the_same_plan() -> None:
    encodings, encoder = make_encodings()
    encodings.update(EncoderWork([], INPUTS[:2]))
    encodings.update(EncoderWork([IMAGES[0].hash, IMAGES[1].hash], INPUTS[:1]))
    assert encoder.num_calls == 3
    assert embeddings(encodings, MediaPart(IMAGES[0].hash, 0, 1)).tolist() == [[1, 1, 1, 0, 0, 2]]
    with pytest.raises(KeyError):
        embeddings(encodings, MediaPart(IMAGES[1].hash, 0, 1))


def test_the_runner_frees_and_encodes_before_a_step() -> None:
    encodings, _ = make_encodings()
    harness = RunnerHarness(max_num_seqs=2, images=image_config(has_three_positions=False), encodings=encodings)
    plan = harness.schedule({"a": ([1, 2], 2, GREEDY)})
    harness.run(harness.runner.prepare_inputs(with_images(plan, {"a": IMAGES[:1]}, INPUTS[:1])))
    assert embeddings(encodings, MediaPart(IMAGES[0].hash, 0, 1)).tolist() == [[1, 1, 1, 0, 0, 0]]
    plan = harness.schedule(known={"a": 2})
    harness.run(harness.runner.prepare_inputs(with_images(plan, {}, (), [IMAGES[0].hash])))
    assert not encodings._encoded


def test_ranks_share_the_images_of_a_step_and_have_the_same_results() -> None:
    queues: list[Queue[Tensor]] = [Queue(), Queue()]
    ranks = [make_encodings(FakeParallel(rank, queues)) for rank in range(2)]
    plan = with_images(RunnerHarness().schedule(), {}, INPUTS)
    with ThreadPoolExecutor(2) as threads:
        for rank, (encodings, _) in enumerate(ranks):
            threads.submit(encodings.update, EncoderWork([], for_rank(plan, rank, 2).encoder_inputs))
    assert [encoder.num_calls for _, encoder in ranks] == [2, 1]
    parts = [MediaPart(image.hash, 0, image.num_tokens) for image in IMAGES]
    assert torch.equal(*(embeddings(encodings, *parts) for encodings, _ in ranks))


def test_a_rank_is_sent_the_pixels_that_it_encodes_and_no_others() -> None:
    plan = with_images(RunnerHarness().schedule({"a": ([1], 1, SamplingParams())}), {"a": IMAGES}, INPUTS, [b"freed"])
    frame = encode(wire.Step(for_rank(plan, 1, 2)))
    received: Any = msgspec.msgpack.decode(frame[4:], type=wire.ToWorker).scheduler_output
    assert [bool(image.data) for image in received.encoder_inputs] == [False, True, False]
    assert received.encoder_inputs[1] == INPUTS[1]
    assert list(received.new_requests[0].media) == IMAGES
    assert received.freed_media == [b"freed"]
    assert plan.encoder_inputs[0].data


def test_sizes_of_images_are_within_the_models_limits() -> None:
    config = image_config()
    assert image_of(config.input, 12) == (3 * UNIT, 4 * UNIT)
    assert image_of(config.input, 1000) == (10 * UNIT, 10 * UNIT)
    assert image_of(replace(config.input, min_pixels=16 * UNIT**2), 1) == (4 * UNIT, 4 * UNIT)
    assert image_of(replace(config.input, side=8), 1000) == (8, 8)
    rows = replace(config.input, row_end="<row>", min_pixels=0, max_pixels=0, max_side=10 * UNIT - 1)
    assert rows.max_tokens == 109
    assert image_of(rows, 1000) == (10 * UNIT, 10 * UNIT)
    assert all(rows.num_tokens(*image_of(rows, count)) <= count for count in range(1, 109))


def test_kept_images_and_the_largest_one_take_memory() -> None:
    config, images = EngineConfig(model="unused", max_num_batched_tokens=300), replace(image_config(), token_values=50)
    assert encoder_cache_bytes(config, images, 2) == 300 * WIDTH * 2
    assert cpu_encoder_bytes(config, images, 256, 2) == 300 * WIDTH * 2 + 100 * 50 * 2
    assert encoder_cache_bytes(config, None, 2) == cpu_encoder_bytes(config, None, 256, 2) == 0
    assert most_image_tokens(config, images.input, 80) == 80
    assert most_image_tokens(replace(config, images=ImageOptions(encoder_cache_size=70)), images.input, 80) == 70


@pytest.mark.parametrize("max_num_batched_tokens", [64, 200])
def test_the_warm_up_encodes_the_largest_image(max_num_batched_tokens: int) -> None:
    """Its tokens are computed if they fit into a step."""
    encodings, _ = make_encodings()
    harness = RunnerHarness(FakeModel(), images=image_config(has_three_positions=False), encodings=encodings)
    config = EngineConfig(model="unused", max_num_batched_tokens=max_num_batched_tokens, max_num_seqs=4)
    work = WarmUp(
        harness.runner,
        config,
        vocab_size=VOCAB_SIZE,
        max_model_len=256,
        groups=CacheGroups(num_blocks=3, block_size=BLOCK_SIZE),
        pooling=PoolingConfig(),
        generates=True,
        images=image_config(),
    )
    work.run_largest()
    input_ids, _, metadata = harness.model.calls[0]
    assert input_ids.numel() == min(100, max_num_batched_tokens)
    assert (metadata.media is not None) == (max_num_batched_tokens >= 100)
    assert not encodings._encoded
    assert work.run().images > 0
