"""Tokens of images in a step, and three positions, with and without graphs and drafts."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from proa.contract import SamplingParams
from proa_engine.core.types import MediaSpan
from proa_engine.json_configs import SpeculativeConfig
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.image_config import ImageConfig
from proa_engine.step.drafts import DraftColumns
from proa_engine.step.image_attention import ImagePositions, three_positions
from proa_engine.step.media import IMAGE_DIMS, MediaEncodings, PixelEncoder
from support.images import IMAGE_TOKEN, UNIT, FakeEncoder, encoder_input, image_config, span, with_images
from support.runner import FakeModel, RunnerHarness, StepResult

GREEDY = SamplingParams(temperature=0)
# Three tokens of text, 2 x 3 of an image, two of text, 3 x 1 of another image, and text.
PROMPT = [5, 6, 7, *[IMAGE_TOKEN] * 6, 8, 9, *[IMAGE_TOKEN] * 3, 10, 11]
IMAGES = (span(3, 2, 3, b"a"), span(11, 3, 1, b"b"))
ENCODED = [encoder_input(IMAGES[0], 7), encoder_input(IMAGES[1], 9)]
POSITIONS = [
    [0, 1, 2, 3, 3, 3, 3, 3, 3, 6, 7, 8, 8, 8, 11, 12],
    [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11, 12],
    [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 8, 8, 11, 12],
]
DELTA = -3


class RotatedModel(FakeModel):
    """Logits depend on the position of the rotation. Records a token's three positions, and its embedding or zeros."""

    def __init__(self) -> None:
        super().__init__()
        self.positions: list[Tensor] = []
        self.embeddings: list[Tensor] = []

    def __call__(self, input_ids: Tensor, positions: Tensor, caches: Any, metadata: Any) -> Tensor:
        self.positions.append(positions.clone())
        images = metadata.media
        values = torch.zeros(input_ids.shape[0], 1 if images is None else images.embeddings.shape[1])
        if images is not None:
            values[images.rows] = images.embeddings
        self.embeddings.append(values)
        return super().__call__(input_ids, positions.expand(3, -1).sum(0), caches, metadata)


def make_harness(config: ImageConfig | None = None, **options: Any) -> tuple[RunnerHarness, RotatedModel]:
    config, model = config or image_config(), RotatedModel()
    encoders = {IMAGE_DIMS: PixelEncoder(FakeEncoder(), config)}
    encodings = MediaEncodings(encoders, torch.float32, torch.device("cpu"), ParallelContext())
    harness = RunnerHarness(model, max_num_seqs=4, images=config, encodings=encodings, **options)
    model.positions.clear()
    model.embeddings.clear()
    return harness, model


def run_prompt(harness: RunnerHarness, num_tokens: int = len(PROMPT), name: str = "a") -> StepResult:
    """Compute the first `num_tokens` tokens of the prompt with images."""
    plan = harness.schedule({name: (PROMPT, len(PROMPT), GREEDY)}, scheduled={name: num_tokens})
    return harness.run(harness.runner.prepare_inputs(with_images(plan, {name: IMAGES}, ENCODED)))


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[MediaSpan], int]:
    """Images between texts, which may be empty at the ends, and the number of tokens in all."""
    images: list[MediaSpan] = []
    place = draw(st.integers(0, 5))
    for index in range(draw(st.integers(1, 4))):
        image = span(place, draw(st.integers(1, 6)), draw(st.integers(1, 6)), bytes([index]))
        images.append(image)
        place += image.num_tokens + draw(st.integers(1, 5))
    return images, place - draw(st.integers(0, 1))


@pytest.mark.parametrize("model_class", [Qwen2_5_VLModel, Qwen3VLModel, Qwen3_5Model])
@settings(max_examples=30)
@given(layout=layouts())
def test_three_positions_are_those_of_transformers(model_class: Any, layout: tuple[list[MediaSpan], int]) -> None:
    images, num_tokens = layout
    types = torch.zeros(1, num_tokens, dtype=torch.int32)
    for image in images:
        types[0, image.offset : image.offset + image.num_tokens] = 1
    merge = 2
    grids = torch.tensor([[1, merge * image.shape[0] // UNIT, merge * image.shape[1] // UNIT] for image in images])
    model = model_class.__new__(model_class)
    torch.nn.Module.__init__(model)
    model.config = model_class.config_class()
    model.config.vision_config.spatial_merge_size = merge
    expected, delta = model.get_rope_index(torch.zeros(1, num_tokens, dtype=torch.int64), types, grids)
    positions = three_positions(images, UNIT)
    ours = ImagePositions(images, positions)
    behind = np.tile(np.arange(ours.end, num_tokens) + ours.delta, (3, 1))
    assert np.concatenate((positions, behind), axis=1).tolist() == expected[:, 0].tolist()
    assert ours.delta == delta.item()


def test_a_prompts_tokens_have_three_positions_and_embeddings() -> None:
    harness, model = make_harness()
    run_prompt(harness)
    assert model.positions[0].tolist() == POSITIONS
    embeddings = model.embeddings[0]
    assert embeddings[3:9].tolist() == [[7, 7, 7, row, column, 0] for row in range(2) for column in range(3)]
    assert embeddings[11:14].tolist() == [[9, 9, 9, row, 0, 1] for row in range(3)]
    assert not embeddings[[0, 1, 2, 9, 10, 14, 15]].any()


@pytest.mark.parametrize("sizes", [[1] * 16, [4, 4, 4, 4], [3, 6, 2, 3, 2], [9, 1, 6]])
@pytest.mark.parametrize("graphs", [False, True])
def test_chunks_have_the_positions_and_embeddings_of_the_whole_prompt(sizes: list[int], graphs: bool) -> None:
    """Also those of one token, within an image and between images."""
    whole, expected = make_harness()
    token = run_prompt(whole).sampled_token_ids
    harness, model = make_harness(graphs=graphs)
    run_prompt(harness, sizes[0])
    output: StepResult | None = None
    computed = sizes[0]
    for size in sizes[1:]:
        output = harness.step(known={"a": computed}, scheduled={"a": size})
        computed += size
    assert output is not None
    assert output.sampled_token_ids == token
    rows = [p if p.dim() == 2 else p[None, :1].expand(3, -1) for p in model.positions]  # graphs pad to one row here
    assert torch.cat(rows, 1).tolist() == POSITIONS
    embeddings = torch.cat([each.expand(-1, 6) for each in model.embeddings])
    assert torch.equal(embeddings, expected.embeddings[0])


@pytest.mark.parametrize("graphs", [False, True])
def test_decodes_are_rotated_by_the_delta_behind_images(graphs: bool) -> None:
    """Beside a request without images, and one that takes the slot of a request with images."""
    harness, model = make_harness(graphs=graphs)
    run_prompt(harness)
    harness.step({"plain": ([1, 2], 2, GREEDY)}, known={"a": 16})
    assert model.positions[-1].tolist() == [[16 + DELTA, 0, 1]] * 3
    harness.step(known={"a": 17, "plain": 2})
    expected = [17 + DELTA, 2]
    assert model.positions[-1].tolist() == (expected if graphs else [expected] * 3)
    assert harness.capture.num_replays == int(graphs)
    harness.step({"next": ([3], 1, GREEDY)}, known={"plain": 3}, finished=["a"])
    assert harness.batch.slots_of(["next"]).tolist() == [0]
    harness.step(known={"next": 1, "plain": 4})
    assert model.positions[-1].tolist() == [1, 4]


def test_replayed_steps_with_images_sample_the_same_tokens() -> None:
    results = []
    for graphs in (False, True):
        harness, _ = make_harness(graphs=graphs)
        tokens = [run_prompt(harness, name="i").sampled_token_ids, harness.step({"p": ([1, 2], 2, GREEDY)}, {"i": 16})]
        tokens += [harness.step(known={"i": 17 + step, "p": 2 + step}).sampled_token_ids for step in range(6)]
        results.append(tokens)
    assert results[0] == results[1]


@pytest.mark.parametrize("graphs", [False, True])
def test_drafts_behind_images_are_rotated_from_the_true_end(graphs: bool) -> None:
    harness, model = make_harness(graphs=graphs, drafts=SpeculativeConfig(method="ngram", num_speculative_tokens=2))
    run_prompt(harness)
    harness.step(known={"a": 16}, scheduled={"a": 3})
    position = 16 + DELTA
    first = [position, position + 1, position + 2]
    assert model.positions[-1].tolist() == (first if graphs else [first] * 3)
    # The host plans from an upper bound: as if both drafts had been accepted.
    (drafts,) = (feature for feature in harness.batch.features if isinstance(feature, DraftColumns))
    length = int(drafts._lengths[harness.batch.slots_of(["a"])[0]])
    harness.step(known={"a": 19}, scheduled={"a": 3})
    second = [length - 1 + DELTA + index for index in range(3)]
    assert model.positions[-1].tolist() == (second if graphs else [second] * 3)


def test_steps_without_images_have_one_position_and_stage_nothing_more() -> None:
    harness, model = make_harness()
    plain = RunnerHarness(FakeModel(), max_num_seqs=4)
    plans = [each.schedule({"a": ([1, 2, 3], 3, GREEDY)}) for each in (harness, plain)]
    inputs = [each.runner.prepare_inputs(plan) for each, plan in zip((harness, plain), plans, strict=True)]
    assert inputs[0] is not None
    assert inputs[1] is not None
    rows = inputs[0].rows
    assert rows == inputs[1].rows
    harness.run(inputs[0])
    assert model.positions[0].tolist() == [0, 1, 2]
    assert model.calls[0][2].media is None
    assert model.calls[0][2].ends is None


def test_models_with_one_position_have_it_behind_images_too() -> None:
    harness, model = make_harness(image_config(has_three_positions=False), graphs=True)
    run_prompt(harness)
    harness.step(known={"a": 16})
    assert [positions.tolist() for positions in model.positions] == [list(range(16)), [16]]


def test_tokens_end_where_their_image_ends() -> None:
    harness, model = make_harness(image_config(has_three_positions=False, attends_within=True))
    plan = harness.schedule({"p": ([1, 2], 2, GREEDY), "a": (PROMPT, 16, GREEDY)}, scheduled={"a": 9})
    harness.run(harness.runner.prepare_inputs(with_images(plan, {"a": IMAGES}, ENCODED)))
    ends = model.calls[-1][2].ends
    assert ends.dtype == torch.int32
    assert ends.tolist() == [1, 2, 1, 2, 3, *[9] * 6]
    harness.step(known={"a": 9}, scheduled={"a": 2})
    assert model.calls[-1][2].ends is None


def test_a_resumed_request_behind_its_images_needs_no_encodings() -> None:
    harness, model = make_harness()
    plan = harness.schedule({"a": ([*PROMPT, 12, 13], 16, GREEDY)}, scheduled={"a": 3})
    new = [replace(request, num_computed_tokens=15) for request in plan.new_requests]
    harness.run(harness.runner.prepare_inputs(with_images(replace(plan, new_requests=new), {"a": IMAGES})))
    assert model.positions[0].tolist() == [[12, 13, 14]] * 3
    assert model.calls[0][2].media is None
