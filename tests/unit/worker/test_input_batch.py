"""The edited batch against one that is rebuilt from scratch for every step, over random lives of requests."""

import random
from dataclasses import dataclass

import torch

from proa.contract import SamplingParams
from support.runner import BLOCK_SIZE, VOCAB_SIZE, FakeModel, RunnerHarness

MAX_RUNNING = 6


@dataclass
class Life:
    """What the scheduler would know of a request."""

    tokens: list[int]
    num_prompt: int
    params: SamplingParams
    computed: int = 0


def random_life(rows: random.Random) -> Life:
    tokens = rows.choices(range(VOCAB_SIZE), k=rows.randint(1, 30))
    penalty = rows.choice([0.0, 0.7])
    temperature = rows.choice([0.0, 1.2])
    return Life(
        tokens,
        len(tokens),
        SamplingParams(temperature=temperature, frequency_penalty=penalty, key=rows.getrandbits(64)),
    )


def expected_token(model: FakeModel, life: Life) -> int:
    """The next token, from a worker that has never seen anything else."""
    [[token]] = RunnerHarness(model).step({"only": (life.tokens, life.num_prompt, life.params)}).sampled_token_ids
    return token


def test_edited_batch_equals_a_rebuilt_one_over_random_lives() -> None:
    rows = random.Random(20)
    model = FakeModel()
    harness = RunnerHarness(model, max_num_seqs=MAX_RUNNING)
    running: dict[str, Life] = {}
    paused: dict[str, Life] = {}
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
        new: dict[str, Life] = {}
        while len(running) + len(new) < MAX_RUNNING and rows.random() < 0.6:
            back = next((name for name in paused if name not in preempted), None)
            name = back or f"r{step}-{len(new)}"
            new[name] = paused.pop(name) if back else random_life(rows)
            new[name].computed = 0
        known = {name: life for name, life in running.items() if rows.random() < 0.9}
        running |= new
        left = {name: len(life.tokens) - life.computed for name, life in (new | known).items()}
        scheduled = {name: rows.choice([count, rows.randint(1, count)]) for name, count in left.items()}
        output = harness.step(
            {name: (life.tokens, life.num_prompt, life.params) for name, life in new.items()},
            {name: life.computed for name, life in known.items()},
            scheduled=scheduled,
            finished=gone,
            preempted=preempted,
        )
        gone, preempted = [], []
        check_inputs(model, output.request_ids, running, scheduled)
        for name, sampled in zip(output.request_ids, output.sampled_token_ids, strict=True):
            life = running[name]
            life.computed += scheduled[name]
            assert len(sampled) == (life.computed == len(life.tokens))
            if sampled:
                assert sampled == [expected_token(model, life)]
                life.tokens += sampled
                num_checked += 1
        assert len(harness.batch) == len(running)
    assert num_checked > 200


def check_inputs(model: FakeModel, names: list[str], lives: dict[str, Life], scheduled: dict[str, int]) -> None:
    """The tensors of the model's last call, against the plan's plain meaning."""
    if not names:
        return
    input_ids, positions, metadata = model.calls[-1]
    chunks = [range(lives[name].computed, lives[name].computed + scheduled[name]) for name in names]
    assert positions.tolist() == [position for chunk in chunks for position in chunk]
    assert input_ids.tolist() == [
        lives[name].tokens[position] for name, chunk in zip(names, chunks, strict=True) for position in chunk
    ]
    assert metadata.seq_lens.tolist() == [chunk.stop for chunk in chunks]
    assert metadata.query_start_loc.diff().tolist() == [len(chunk) for chunk in chunks]
    assert metadata.num_decodes == sum(len(chunk) == 1 for chunk in chunks)
    rows = torch.repeat_interleave(torch.arange(len(names)), metadata.query_start_loc.diff().long())
    blocks = metadata.block_table[rows, positions // BLOCK_SIZE].long()
    assert torch.equal(metadata.slot_mapping, blocks * BLOCK_SIZE + positions % BLOCK_SIZE)
    for row, chunk in enumerate(chunks):
        used = metadata.block_table[row, : -(-chunk.stop // BLOCK_SIZE)].tolist()
        assert len(set(used)) == len(used), "a request's blocks are its own"


def test_every_slot_is_given_out_again() -> None:
    harness = RunnerHarness(max_num_seqs=2)
    params = SamplingParams(temperature=0)
    for turn in range(5):
        names = [f"{turn}-a", f"{turn}-b"]
        harness.step({name: ([1, 2, 3], 3, params) for name in names})
        assert len(harness.batch) == 2
        harness.step(finished=names[:1], preempted=names[1:])
        assert len(harness.batch) == 0
