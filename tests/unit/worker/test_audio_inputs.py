"""The blocks that a step's tokens read of their audios, with and without graphs, and the encoder's turns."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from proa.contract import AudioInput
from proa_engine.core.kv.cache_groups import CacheGroups
from proa_engine.core.types import CrossInput, EncodedAudio, SchedulerOutput
from proa_engine.layers.attention_metadata import AttentionMetadata
from proa_engine.layers.parallel import ParallelContext
from proa_engine.models.audio_config import AudioConfig
from proa_engine.step.audio import AudioColumns, AudioWriter
from proa_engine.step.columns import ForwardInputs, Rows
from proa_engine.step.decode_graphs import GraphShape, pad_rows
from proa_engine.step.media import for_rank
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import Packer
from proa_engine.worker.warmup_steps import prefill_step

CPU = torch.device("cpu")
BLOCK, WIDTH, NUM_SLOTS = 4, 2, 3
AUDIOS = {0: EncodedAudio((7, 2, 9), 10), 2: EncodedAudio((5,), 3)}  # by slot
CONFIG = AudioConfig(input=AudioInput(sampling_rate=1, hop=1, pad_to=1, max_samples=12), embedding_width=WIDTH)


@dataclass
class FakeReader:
    """Its encoder repeats each sample. It is its only layer too, and keeps what is written, by slot."""

    num_encoded: int = 0
    written: dict[int, list[float]] = field(default_factory=dict)

    def audio_encoder(self, samples: Tensor) -> Tensor:
        self.num_encoded += 1
        return samples[:, None].expand(-1, WIDTH)

    def cross_layers(self, caches: Sequence[Any]) -> "list[tuple[FakeReader, None]]":
        return [(self, None)]

    def write(self, encoded: Tensor, cache: None, slot_mapping: Tensor) -> None:
        self.written |= dict(zip(slot_mapping.tolist(), encoded.tolist(), strict=True))


def make_columns() -> AudioColumns:
    tables = SlotTables(max_num_seqs=NUM_SLOTS, max_model_len=16, block_size=BLOCK, vocab_size=9, device=CPU)
    writer = AudioWriter(FakeReader(), CONFIG, (), BLOCK, torch.float32, CPU, ParallelContext())  # type: ignore[arg-type]
    columns, edits, packer = AudioColumns(tables, writer, 12), Edits(), Packer()
    groups = CacheGroups(num_blocks=9, block_size=BLOCK)
    (new,) = prefill_step([1], groups).new_requests
    for slot, audio in AUDIOS.items():
        columns.add(replace(new, audio=audio), slot, edits)
    packed = edits.pack(packer)
    packed.apply(staged(packer))
    return columns


def staged(packer: Packer) -> list[Tensor]:
    arrays = packer.pack()
    return list(torch.from_numpy(arrays.values).split(arrays.lengths))


def forward() -> ForwardInputs:
    none = torch.zeros(0)
    return ForwardInputs(none, none, AttentionMetadata(none, none, (), 0))


def assert_reads(step: ForwardInputs, slots: Sequence[int]) -> None:
    """Each token reads the audio of its slot; one that was never used has one token."""
    rows = step.metadata.audio
    assert rows is not None
    assert rows.query_start_loc.tolist() == list(range(len(slots) + 1))
    for slot, blocks, length in zip(slots, rows.block_table.tolist(), rows.seq_lens.tolist(), strict=True):
        audio = AUDIOS.get(slot, EncodedAudio((0,), 1))
        assert length == audio.num_tokens
        assert tuple(blocks[: len(audio.block_ids)]) == audio.block_ids


def test_each_token_reads_the_audio_of_its_request() -> None:
    columns, packer, step = make_columns(), Packer(), forward()
    slots, counts = np.array([2, 0]), np.array([1, 3])
    ends = np.array([5, 3])
    rows = Rows(["b", "a"], slots, ends - counts, ends, counts, np.ones(2, np.int64), np.array([0, 1, 4]), {})
    columns.lay_out(rows, packer).fill(step, staged(packer))
    assert_reads(step, [2, 0, 0, 0])


@pytest.mark.parametrize("width", [1, 3])
def test_a_graph_reads_them_by_slot_and_padding_reads_that_of_slot_0(width: int) -> None:
    columns, step = make_columns(), forward()
    padded = pad_rows(np.array([1, 2]), np.array([5, 9]), width, 3)
    columns.fill_decodes(step, torch.from_numpy(padded).view(3, 3), GraphShape(3, width))
    assert_reads(step, [slot for slot in (1, 2, 0) for _ in range(width)])


def test_samples_are_written_to_the_slots_of_their_blocks() -> None:
    reader = FakeReader()
    writer = AudioWriter(reader, CONFIG, (), BLOCK, torch.float32, CPU, ParallelContext())  # type: ignore[arg-type]
    samples = np.arange(6, dtype="<f4")
    writer.write([CrossInput([3, 1], 6, samples.tobytes())])
    assert reader.written == {slot: [value] * WIDTH for value, slot in enumerate([12, 13, 14, 15, 4, 5])}


def test_a_rank_gets_the_samples_that_it_encodes() -> None:
    audios = [CrossInput([index], 1, bytes([index])) for index in range(3)]
    step = SchedulerOutput(
        step=1,
        new_requests=[],
        cached_requests=[],
        decode_request_ids=[],
        num_chunk_tokens={},
        finished_request_ids=[],
        preempted_request_ids=[],
        cross_inputs=audios,
    )
    assert [audio.samples for audio in for_rank(step, 0, 2).cross_inputs] == [b"\0", b"", b"\2"]
    assert [audio.samples for audio in for_rank(step, 1, 2).cross_inputs] == [b"", b"\1", b""]
