"""InputBatch: edited step by step, it gives what one built from scratch gives, for random requests."""

import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from proa.contract import SamplingParams
from proa_engine.core.types import NewRequestData
from proa_engine.memory.cache_plan import CacheMemory
from proa_engine.step.columns import Columns, ForwardInputs, Rows
from proa_engine.step.input_batch import InputBatch
from proa_engine.step.model_runner import ModelRunner
from proa_engine.step.slots import Edits, SlotTables
from proa_engine.step.staging import Packer
from support.runner import BLOCK_SIZE, VOCAB_SIZE, FakeModel, RunnerHarness, make_batch

MAX_RUNNING = 6


@dataclass
class State:
    """The scheduler's state of a request."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    computed: int = 0


def random_state(rows: random.Random) -> State:
    tokens = rows.choices(range(VOCAB_SIZE), k=rows.randint(1, 30))
    penalty = rows.choice([0.0, 0.7])
    temperature = rows.choice([0.0, 1.2])
    return State(
        tokens,
        len(tokens),
        SamplingParams(temperature=temperature, frequency_penalty=penalty, key=rows.getrandbits(64)),
    )


def expected_token(model: FakeModel, state: State) -> int:
    """The next token of the request, from a new runner."""
    [[token]] = RunnerHarness(model).step({"only": (state.tokens, state.num_prompt, state.params)}).sampled_token_ids
    return token


def test_an_edited_batch_equals_a_new_one() -> None:
    rows = random.Random(20)
    model = FakeModel()
    harness = RunnerHarness(model, max_num_seqs=MAX_RUNNING)
    running: dict[str, State] = {}
    paused: dict[str, State] = {}
    gone: list[str] = []
    preempted: list[str] = []
    num_checked = 0
    for step in range(150):
        for name in [name for name in running if rows.random() < 0.08]:
            if rows.random() < 0.5:
                gone.append(name)
                del running[name]
            else:
                preempted.append(name)
                paused[name] = running.pop(name)
        new: dict[str, State] = {}
        while len(running) + len(new) < MAX_RUNNING and rows.random() < 0.6:
            back = next((name for name in paused if name not in preempted), None)
            name = back or f"r{step}-{len(new)}"
            new[name] = paused.pop(name) if back else random_state(rows)
            new[name].computed = 0
        known = {name: state for name, state in running.items() if rows.random() < 0.9}
        running |= new
        left = {name: len(state.tokens) - state.computed for name, state in (new | known).items()}
        scheduled = {name: rows.choice([count, rows.randint(1, count)]) for name, count in left.items()}
        output = harness.step(
            {name: (state.tokens, state.num_prompt, state.params) for name, state in new.items()},
            {name: state.computed for name, state in known.items()},
            scheduled=scheduled,
            finished=gone,
            preempted=preempted,
        )
        gone, preempted = [], []
        check_inputs(model, output.request_ids, running, scheduled)
        for name, sampled in zip(output.request_ids, output.sampled_token_ids, strict=True):
            state = running[name]
            state.computed += scheduled[name]
            assert len(sampled) == (state.computed == len(state.tokens))
            if sampled:
                assert sampled == [expected_token(model, state)]
                state.tokens += sampled
                num_checked += 1
        assert len(harness.batch) == len(running)
    assert num_checked > 200


def check_inputs(model: FakeModel, names: list[str], states: dict[str, State], scheduled: dict[str, int]) -> None:
    """Check the tensors of the model's last call against the scheduled tokens."""
    if not names:
        return
    input_ids, positions, metadata = model.calls[-1]
    chunks = [range(states[name].computed, states[name].computed + scheduled[name]) for name in names]
    assert positions.tolist() == [position for chunk in chunks for position in chunk]
    assert input_ids.tolist() == [
        states[name].tokens[position] for name, chunk in zip(names, chunks, strict=True) for position in chunk
    ]
    assert metadata.seq_lens.tolist() == [chunk.stop for chunk in chunks]
    assert metadata.query_start_loc.diff().tolist() == [len(chunk) for chunk in chunks]
    assert metadata.num_decodes == sum(len(chunk) == 1 for chunk in chunks)
    rows = torch.repeat_interleave(torch.arange(len(names)), metadata.query_start_loc.diff().long())
    blocks = metadata.tables[0].block_table[rows, positions // BLOCK_SIZE].long()
    assert torch.equal(metadata.tables[0].slot_mapping, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
    for row, chunk in enumerate(chunks):
        used = metadata.tables[0].block_table[row, : -(-chunk.stop // BLOCK_SIZE)].tolist()
        assert len(set(used)) == len(used), "a request's blocks are its own"


def test_slots_are_reused() -> None:
    harness = RunnerHarness(max_num_seqs=2)
    params = SamplingParams(temperature=0)
    for turn in range(5):
        names = [f"{turn}-a", f"{turn}-b"]
        harness.step({name: ([1, 2, 3], 3, params) for name in names})
        assert len(harness.batch) == 2
        harness.step(finished=names[:1], preempted=names[1:])
        assert len(harness.batch) == 0


@dataclass(frozen=True)
class MarkInputs:
    table: Tensor
    slots: int

    def fill(self, forward: ForwardInputs, arrays: Sequence[Tensor]) -> None:
        forward.metadata.token_types = self.table[arrays[self.slots]]


class MarkColumns(Columns):
    """A made-up input: each request brings a number, its first token, which the model gets for each of its tokens."""

    def __init__(self, tables: SlotTables) -> None:
        self.table = torch.zeros(tables.num_slots, dtype=torch.int64)
        self.removed: list[int] = []

    def add(self, request: NewRequestData, slot: int, edits: Edits) -> None:
        edits.write(self.table, (slot,), (request.token_ids[0],))

    def remove(self, slot: int) -> None:
        self.removed.append(slot)

    def lay_out(self, rows: Rows, packer: Packer) -> MarkInputs:
        return MarkInputs(self.table, packer.add(np.repeat(rows.slots, rows.counts)))


def test_a_new_input_of_requests_is_one_class_and_reaches_the_model() -> None:
    harness = RunnerHarness(max_num_seqs=2)
    plain = make_batch(max_num_seqs=2)
    marks = MarkColumns(plain.tables)
    batch = InputBatch(plain.tables, plain.sampling, [marks])
    harness.runner = ModelRunner(harness.model, CacheMemory(), batch, max_logprobs=0)  # type: ignore[arg-type]
    greedy = SamplingParams(temperature=0)
    harness.step({"a": ([7, 8, 9], 3, greedy), "b": ([5, 6], 2, greedy)}, scheduled={"a": 2})
    harness.step(known={"b": 2, "a": 2})
    harness.step({"c": ([4], 1, greedy)}, known={"b": 3}, preempted=["a"])
    given = [metadata.token_types.tolist() for _, _, metadata in harness.model.calls]
    assert given == [[7, 7, 5, 5], [5, 7], [4, 5]]
    assert marks.removed == [0]
