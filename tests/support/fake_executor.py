"""FakeExecutor: a device made of lists, which believes nothing that the core tells it.

It keeps what a worker keeps (tokens, block tables, slots) and a paged cache whose every slot remembers which token, in
which context and which table, was written there. Each planned step reads back what its rows attend to, so that a block
given to two requests, one that is freed too early, a prefix found by mistake or a position computed twice or never
fails at once, with a sentence. A slot of recurrent states remembers of how many tokens it is, and in which context.
"""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from zlib import crc32

from proa.contract import PoolingParams, PoolingTask, PromptEmbeds, SamplingParams, TokenLogprobs
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.lora_store import LoraNotFound
from proa_engine.core.types import (
    BASE_MODEL,
    NO_AUDIO,
    CachedRequestData,
    Drafts,
    EncodedAudio,
    LoraSlot,
    MediaSpan,
    ModelRunnerOutput,
    NewRequestData,
    PooledRows,
    RowOutput,
    SchedulerOutput,
    StateSteps,
)
from proa_engine.models.audio_config import AudioConfig
from proa_engine.models.image_config import ImageConfig
from proa_engine.models.pooling_config import PoolingConfig
from support.fake_audio import encode, read
from support.fake_embeds import rows_of, with_embeds
from support.fake_host import FakeHost
from support.fake_images import FakeEncodings, seen

_MODULUS = 2**61 - 1
VOCAB_SIZE = 61
LAST_TOKEN_TASKS = frozenset({PoolingTask.CLASSIFY, PoolingTask.TOKEN_LOGPROBS})
NO_DRAFTS = Drafts(0, 0)


def fingerprint(before: int, token_id: int) -> int:
    """Names a token in its context: equal exactly where all tokens up to here are."""
    return (before * 1_000_003 + token_id + 1) % _MODULUS


def next_token(context: int) -> int:
    """The token that the fake model says after this context."""
    return (context ^ context >> 29) % VOCAB_SIZE


def pool(prompt: Sequence[int], task: PoolingTask) -> bytes:
    """The fake model's values of a prompt: of each token, of the last one, or the sum of all."""
    contexts, context = list[int](), 0
    for token_id in prompt:
        context = fingerprint(context, token_id)
        contexts.append(context)
    if task.is_by_token:
        return as_values(contexts)
    return as_values(contexts[-1:] if task in LAST_TOKEN_TASKS else [sum(contexts)])


def as_values(numbers: Iterable[int]) -> bytes:
    return b"".join(number.to_bytes(16, "little") for number in numbers)


def choose(context: int, allowed: Collection[int]) -> int:
    """The token that the fake model says if it must be one of `allowed`; 0 if none is."""
    first = next_token(context)
    return min(allowed, key=lambda token_id: (token_id - first) % VOCAB_SIZE, default=0)


def allowed_by_sample(masks: GrammarMasks | None) -> dict[tuple[int, int], set[int]]:
    """By row and place in it."""
    if masks is None:
        return {}
    assert masks.bits.format == "i"
    num_words = -(-VOCAB_SIZE // 32)
    assert masks.bits.shape == (len(masks.rows), num_words)
    words = list(masks.bits.cast("B").cast("i"))
    of_row = [words[start : start + num_words] for start in range(0, len(words), num_words)]
    return {
        (row, place): {token_id for token_id in range(VOCAB_SIZE) if bits[token_id // 32] >> token_id % 32 & 1}
        for row, place, bits in zip(masks.rows, masks.places, of_row, strict=True)
    }


def first_context(lora_digest: str) -> int:
    """The context of the first token, by the adapter's content: each adapter is a model of its own."""
    return crc32(lora_digest.encode())


def generate(
    prompt: Sequence[int], params: SamplingParams, eos_token_ids: frozenset[int], limit: int, lora_digest: str = ""
) -> list[int]:
    """What a request must produce, said without any scheduling: at most `limit` tokens of prompt and output."""
    context, output = first_context(lora_digest), list[int]()
    for token_id in prompt:
        context = fingerprint(context, token_id)
    ends = set(params.stop_token_ids) | (set() if params.ignore_eos else eos_token_ids)
    while True:
        output.append(next_token(context))
        context = fingerprint(context, output[-1])
        if output[-1] in ends and len(output) >= params.min_tokens:
            return output
        if len(output) == params.max_tokens or len(prompt) + len(output) == limit:
            return output


@dataclass(frozen=True)
class FakeModelConfig:
    vocab_size: int = VOCAB_SIZE
    hidden_size: int = 4
    model_type: str = "fake"
    has_lm_head: bool = True
    is_encoder: bool = False
    pooling: PoolingConfig = field(default_factory=PoolingConfig)
    images: ImageConfig | None = None
    audios: AudioConfig | None = None


@dataclass
class FakeRow:
    """What a worker knows of a request."""

    contexts: list[int]  # fingerprint at each token, sampled ones included
    num_prompt_tokens: int
    num_computed_tokens: int
    tables: list[list[int]]  # ids of blocks, those that windows have passed included; -1: never had one
    params: SamplingParams
    lora: LoraSlot = BASE_MODEL
    num_planned_tokens: int = 0  # the most that can have been computed, as the plan says before each step
    start: int = 0  # of the step's tokens
    state_slot: int | None = None
    num_pending: int = 0  # tokens before its start of which the slot has no states yet
    accepted: list[int] = field(default_factory=list)  # of the step's drafts
    rejected: list[int] = field(default_factory=list)  # those behind them
    drafts: Drafts = NO_DRAFTS
    pooling: PoolingParams | None = None
    sum: int = 0  # of a pooled request's contexts
    images: Sequence[MediaSpan] = ()
    audio: EncodedAudio = NO_AUDIO
    audio_number: int = 0
    weights_epoch: int = 0

    @property
    def is_complete(self) -> bool:
        """Whether the step computes the last of its tokens."""
        return self.num_computed_tokens == len(self.contexts)

    @property
    def samples(self) -> bool:
        return self.is_complete and self.pooling is None

    def pool(self) -> PooledRows | None:
        """What the step returns of a pooled request."""
        assert self.pooling is not None
        computed = self.contexts[self.start : self.num_computed_tokens]
        if self.pooling.task.is_by_token:
            return PooledRows(self.start, len(computed), as_values(computed))
        self.sum = sum(computed) + (self.sum if self.start else 0)
        if not self.is_complete:
            return None
        return PooledRows(0, 1, as_values(computed[-1:] if self.pooling.task in LAST_TOKEN_TASKS else [self.sum]))


@dataclass
class FakeFuture:
    """A step's result. `on_host` runs when the core first takes it."""

    output: ModelRunnerOutput
    on_host: Callable[[], None]
    error: BaseException | None = None

    def done(self) -> bool:
        return True

    def result(self, timeout: float | None = None) -> ModelRunnerOutput:
        self.on_host()
        if self.error is not None:
            raise self.error
        return self.output


@dataclass
class FakeExecutor:
    """Computes each step when it is told, and shows its result when the core waits for it.

    `log` holds what happened in order: ("execute", step), ("host", step), and ("mask", step) when a step's masks come,
    None included. `plans` are all plans. `disobeys` are requests whose masks it ignores. `on_execute` is called when a
    step starts, and `while_waiting` in the middle of a step, when the core waits for a result. `fail_at` is the step
    that fails. `accept` says how many of so many draft tokens are right; without it there may be none.
    `prompt_embeds` are those of all requests, by their ids, and `outputs` what requests with a grammar must produce.
    """

    num_blocks: int = 64
    block_size: int = 4
    windows: tuple[int, ...] = ()
    num_state_slots: int = 0
    cross_budget: int = 0  # tokens of the audios that one step encodes; 0: the model has no cross-attention
    max_num_seqs: int = 256
    max_in_flight: int = 2
    num_stages: int = 1
    on_execute: Callable[[], None] | None = None
    while_waiting: Callable[[], None] | None = None
    fail_at: int | None = None
    accept: Callable[[int], int] | None = None
    disobeys: set[str] = field(default_factory=set)
    prompt_embeds: dict[str, Sequence[PromptEmbeds]] = field(default_factory=dict)
    outputs: dict[str, Sequence[int]] = field(default_factory=dict)
    plans: list[SchedulerOutput] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    rows: dict[str, FakeRow] = field(default_factory=dict)
    max_loras: int = 0
    loras: dict[int, str] = field(default_factory=dict)  # digests of loaded adapters, by id
    lora_slots: dict[int, int] = field(default_factory=dict)  # ids, by slot
    lora_reads: list[tuple[int, str, Future[str]]] = field(default_factory=list)  # adapters that are being read
    num_slot_fills: int = 0
    host: FakeHost | None = None
    weights_epoch: int = 0  # a row added in an epoch reads nothing that was computed before it
    encodings: FakeEncodings = field(default_factory=lambda: FakeEncodings(0, 0, attends_within=False))
    num_in_flight: int = 0
    is_shut_down: bool = False
    _started: SchedulerOutput | None = None

    def __post_init__(self) -> None:
        self._unknown: dict[int, set[str]] = {}  # requests for which each step in flight samples
        self._cache: list[list[tuple[int, int, int] | None]] = []  # by block and offset: table, context, epoch
        self._states: list[tuple[int, int, int] | None] = []  # by slot: number of tokens, context, epoch
        self._allocate()

    def execute_model(self, scheduler_output: SchedulerOutput) -> None:
        plan = scheduler_output
        assert self._started is None, "sample_tokens must follow execute_model"
        assert plan.step == len(self.plans) + 1, "steps are numbered without a gap"
        self._started = plan
        self.plans.append(plan)
        self.log.append(("execute", plan.step))
        if self.on_execute is not None:
            self.on_execute()
        self.num_in_flight += 1
        assert self.num_in_flight <= self.max_in_flight, "too many steps in flight"
        self._copy(plan)
        assert self.cross_budget or not plan.cross_inputs
        encode(self._cache, plan.cross_inputs, self.weights_epoch, self.cross_budget)
        self._apply(plan)
        if self.num_stages > 1:
            unknown = set[str]().union(*self._unknown.values())
            assert unknown.isdisjoint(plan.num_scheduled_tokens), "a token is computed that no stage has sampled yet"
        self._check_loads(plan)
        self.encodings.apply(plan)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._write(request_id, num_tokens)
        have_drafts = [bool(self.rows[request_id].drafts.planned) for request_id in plan.num_chunk_tokens]
        expected = [True] * plan.num_drafted_rows + [False] * (len(have_drafts) - plan.num_drafted_rows)
        assert have_drafts == expected, "rows with drafts come before other chunks"
        for request_id in plan.num_scheduled_tokens:
            self._read_back(request_id)
            lora = self.rows[request_id].lora
            assert lora == BASE_MODEL or self.lora_slots[lora.slot] == lora.lora_id, (
                f"{request_id} has another's adapter"
            )
        self._update_states(plan)

    def draft_tokens(self) -> dict[int, list[int]]:
        assert self._started is not None, "execute_model must come first"
        rows = [self.rows[request_id] for request_id in self._started.num_scheduled_tokens]
        constrained = {row: rows[row] for row in self._started.grammar_rows}
        return {row: [*each.accepted, *each.rejected] for row, each in constrained.items() if each.drafts.planned}

    def sample_tokens(self, masks: GrammarMasks | None = None) -> FakeFuture:
        plan, self._started = self._started, None
        assert plan is not None, "execute_model must come first"
        if plan.grammar_rows:
            self.log.append(("mask", plan.step))
        assert plan.grammar_rows == self._constrained_rows(plan)
        allowed = allowed_by_sample(masks)
        assert list(allowed) == sorted(allowed)
        assert {row for row, _ in allowed} <= set(plan.grammar_rows)
        output = ModelRunnerOutput(plain_token_ids=[])
        self._unknown[plan.step] = {name for name in plan.num_scheduled_tokens if self.rows[name].samples}
        for index, request_id in enumerate(plan.num_scheduled_tokens):
            of_row = {place: ids for (row, place), ids in allowed.items() if row == index}
            if request_id in self.disobeys:
                of_row = {}
            self._add_row(output, request_id, self.rows[request_id], of_row)
        error = RuntimeError(f"step {plan.step} failed") if plan.step == self.fail_at else None
        return FakeFuture(output, lambda: self._reach_host(plan.step), error)

    def sleep(self, level: int) -> None:
        assert not self.rows, "requests are unfinished"
        assert self.num_in_flight == 0
        self.log.append(("sleep", level))
        self._end_copies()
        self._cache = []
        self.lora_slots = {}
        self.encodings.clear()

    def wake_up(self) -> None:
        assert not self._cache, "the executor is awake"
        self.log.append(("wake up", 0))
        self._allocate()

    def load_lora(self, lora_id: int, path: str) -> "Future[str]":
        """Reads when the test calls `read_lora`. The content's digest is the path; paths with `missing` have none."""
        assert not self.lora_reads, "two adapters are read at once"
        future: Future[str] = Future()
        self.lora_reads.append((lora_id, path, future))
        return future

    def read_lora(self) -> None:
        ((lora_id, path, future),) = self.lora_reads
        self.lora_reads = []
        if "missing" in path:
            future.set_exception(LoraNotFound(f"there is no adapter at {path}"))
            return
        self.loras[lora_id] = path
        future.set_result(path)

    def unload_lora(self, lora_id: int) -> None:
        del self.loras[lora_id]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _allocate(self) -> None:
        self._cache = [[None] * self.block_size for _ in range(self.num_blocks)]
        self._states = [None] * self.num_state_slots

    def _copy(self, plan: SchedulerOutput) -> None:
        """Run the step's copies before it changes anything; those of the step before have ended."""
        if self.host is None:
            assert not plan.copies
            return
        self._end_copies()
        self.host.begin_step(plan.copies, self._cache, self._states)

    def _check_loads(self, plan: SchedulerOutput) -> None:
        """No row of this step has what is being loaded."""
        loaded = {target for _, target in plan.copies.loads}
        for request_id in plan.num_scheduled_tokens if loaded else ():
            row = self.rows[request_id]
            for table, window in zip(row.tables, (None, *self.windows), strict=True):
                first = 0 if window is None else max(row.num_computed_tokens - window + 1, 0) // self.block_size
                assert loaded.isdisjoint(table[first:]), f"{request_id} has blocks that are being loaded"
        slots = {target for _, target in plan.copies.state_loads}
        used = {slot for steps in plan.states.values() for slot in (steps.read, *(slot for _, slot in steps.writes))}
        assert slots.isdisjoint(used | {self.rows[request_id].state_slot for request_id in plan.num_scheduled_tokens})

    def _end_copies(self) -> None:
        if self.host is not None:
            self.host.end_step(self._cache, self._states)

    def _reach_host(self, step: int) -> None:
        self.log.append(("host", step))
        self.num_in_flight -= 1
        del self._unknown[step]
        if self.while_waiting is not None:
            self.while_waiting()

    def _apply(self, plan: SchedulerOutput) -> None:
        for request_id in [*plan.finished_request_ids, *plan.preempted_request_ids]:
            assert request_id in self.rows, f"{request_id} is forgotten twice, or was never known"
            del self.rows[request_id]
        for sampled in self._unknown.values():  # the id may be used again
            sampled.difference_update(plan.finished_request_ids)
        for new in plan.new_requests:
            self._add(new)
        for known in plan.cached_requests:
            self._update(known)
        assert len(self.rows) <= self.max_num_seqs, "more requests than slots"
        changed = [new.request_id for new in plan.new_requests] + [known.request_id for known in plan.cached_requests]
        assert len(changed) == len(set(changed))
        assert set(changed) <= set(plan.num_scheduled_tokens)
        assert len(plan.num_scheduled_tokens) == len(plan.decode_request_ids) + len(plan.num_chunk_tokens)
        assert plan.total_num_scheduled_tokens == sum(plan.num_scheduled_tokens.values())
        assert all(count > 1 for count in plan.num_chunk_tokens.values()), "rows of one token come first"

    def _add(self, new: NewRequestData) -> None:
        assert new.request_id not in self.rows, f"{new.request_id} is new twice"
        contexts, context = list[int](), first_context(self._fill_slot(new.lora))
        embeds = self.prompt_embeds.get(new.request_id, ())
        wanted = {place: row for place, row in rows_of(embeds).items() if place >= new.num_computed_tokens}
        assert rows_of(new.prompt_embeds) == wanted, f"{new.request_id} lacks embeddings, or has too many"
        numbers = with_embeds(seen(new.token_ids, new.media), embeds)
        audio_number = read(self._cache, new.audio, self.weights_epoch, new.request_id)
        numbers[0] += audio_number
        for token_id in numbers:
            context = fingerprint(context, token_id)
            contexts.append(context)
        self.rows[new.request_id] = FakeRow(
            contexts,
            new.num_prompt_tokens,
            new.num_computed_tokens,
            [list(table) for table in new.block_ids],
            new.sampling_params,
            new.lora,
            new.num_computed_tokens,
            pooling=new.pooling_params,
            images=new.media,
            audio=new.audio,
            audio_number=audio_number,
            weights_epoch=self.weights_epoch,
        )
        assert len(new.block_ids) == 1 + len(self.windows)
        self._poison(table[new.num_computed_tokens // self.block_size :] for table in new.block_ids)

    def _fill_slot(self, lora: LoraSlot) -> str:
        """Put the adapter into its slot, if that holds another one. Returns the digest of its content."""
        if lora == BASE_MODEL:
            return ""
        assert 0 <= lora.slot < self.max_loras
        assert lora.lora_id in self.loras, "an adapter that was unloaded"
        others = [row.lora.lora_id for row in self.rows.values() if row.lora.slot == lora.slot]
        assert set(others) <= {lora.lora_id}, "the slot's adapter is in use"
        if self.lora_slots.get(lora.slot) != lora.lora_id:
            self.num_slot_fills += 1
        self.lora_slots[lora.slot] = lora.lora_id
        return self.loras[lora.lora_id]

    def _update(self, known: CachedRequestData) -> None:
        row = self.rows[known.request_id]
        surplus = known.num_computed_tokens - row.num_computed_tokens
        most = 0 if self.accept is None else row.drafts.planned - len(row.accepted)
        assert 0 <= surplus <= most, f"{known.request_id}: a position is skipped"
        row.num_planned_tokens = known.num_computed_tokens
        if known.new_block_ids:
            for table, ids in zip(row.tables, known.new_block_ids, strict=True):
                table += ids
        self._poison(known.new_block_ids)
        if known.new_token_ids:
            self._write_tokens(row, known)

    def _write_tokens(self, row: FakeRow, known: CachedRequestData) -> None:
        """Forced tokens replace at most one that was sampled beyond the computed ones, behind drafts with the same."""
        sampled = row.contexts[known.num_computed_tokens :]
        del row.contexts[known.num_computed_tokens :]
        assert len(row.contexts) == known.num_computed_tokens, "a position is skipped"
        for token_id in known.new_token_ids:
            row.contexts.append(fingerprint(row.contexts[-1], token_id))
        written = row.contexts[known.num_computed_tokens :]
        assert not row.drafts.planned or sampled == written[:1], "a row of drafts had no mask"

    def _poison(self, tables: Iterable[Sequence[int]]) -> None:
        """Forget what new blocks hold, so that a block is not right by chance."""
        for table in tables:
            for block_id in table:
                assert block_id >= 0, "a new block is none"
                self._cache[block_id] = [None] * self.block_size

    def _write(self, request_id: str, num_tokens: int) -> None:
        row = self.rows[request_id]
        end = row.num_planned_tokens + num_tokens
        assert num_tokens > 0, f"{request_id} has an empty row"
        max_tokens = row.params.max_tokens
        assert max_tokens is None or end < row.num_prompt_tokens + max_tokens, f"{request_id} is planned past its limit"
        assert end <= min(map(len, row.tables)) * self.block_size, f"{request_id} has no slot for a token"
        row.start = row.num_computed_tokens
        row.num_computed_tokens = min(row.start + num_tokens, len(row.contexts))
        self._check_drafts(request_id, row, num_tokens - (row.num_computed_tokens - row.start))
        row.num_planned_tokens = end
        self.encodings.read(request_id, row.images, row.start, row.num_computed_tokens)
        for position in range(row.start, row.start + num_tokens):
            is_right = position < row.num_computed_tokens
            for index, table in enumerate(row.tables):
                block_id = table[position // self.block_size]
                written = (index, row.contexts[position], self.weights_epoch) if is_right else None
                self._cache[block_id][position % self.block_size] = written

    def _check_drafts(self, request_id: str, row: FakeRow, num_drafts: int) -> None:
        """Of a row's tokens so many do not exist yet: drafts, some of which turn out to be right."""
        row.accepted, row.rejected = [], []
        row.drafts = Drafts(num_drafts, num_drafts)
        if num_drafts == 0:
            return
        assert self.accept is not None, f"{request_id} computes a token that does not exist"
        assert row.num_computed_tokens == row.start + 1, f"{request_id} has drafts beside more than its last token"
        for _ in range(self.accept(num_drafts)):
            token_id = self._expected(request_id, row)
            if token_id is None:
                break
            row.accepted.append(token_id)
            row.contexts.append(fingerprint(row.contexts[-1], token_id))
        row.num_computed_tokens += len(row.accepted)
        first_wrong = 1 + (self._expected(request_id, row) or 0)
        row.rejected = [(first_wrong + number) % VOCAB_SIZE for number in range(num_drafts - len(row.accepted))]

    def _expected(self, request_id: str, row: FakeRow) -> int | None:
        """The request's next token; None behind the end of an output under a grammar."""
        if row.params.grammar is None:
            return next_token(row.contexts[-1])
        rest = self.outputs[request_id][len(row.contexts) - row.num_prompt_tokens :]
        return rest[0] if rest else None

    def _read_back(self, request_id: str) -> None:
        """Check all that the row attends to, from the first token that the first of its tokens does."""
        row = self.rows[request_id]
        seen = set[int]()
        for index, (table, window) in enumerate(zip(row.tables, (None, *self.windows), strict=True)):
            first = 0 if window is None else max(row.start - window + 1, 0)
            for position in range(first, row.num_computed_tokens):
                block_id = table[position // self.block_size]
                assert block_id >= 0, f"{request_id} has no block in table {index} at {position}"
                found = self._cache[block_id][position % self.block_size]
                expected = (index, row.contexts[position])
                assert found is not None, f"{request_id} reads nothing in block {block_id} of table {index}"
                assert found[:2] == expected, f"{request_id} reads another's tokens: block {block_id}, table {index}"
                assert found[2] >= row.weights_epoch, f"{request_id} reads what other weights computed"
            blocks = table[first // self.block_size : -(-row.num_computed_tokens // self.block_size)]
            assert seen.isdisjoint(blocks), f"{request_id} has a block twice"
            seen.update(blocks)
            assert len(set(blocks)) == len(blocks), f"{request_id} has a block twice"
        assert read(self._cache, row.audio, row.weights_epoch, request_id) == row.audio_number

    def _update_states(self, plan: SchedulerOutput) -> None:
        """All rows run at the same time: no slot may be written by one and read or written by another."""
        assert plan.states.keys() <= plan.num_scheduled_tokens.keys()
        if not self.num_state_slots:
            assert not plan.states
            return
        reads, writes = dict[int, str](), dict[int, str]()
        states = list(self._states)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            row = self.rows[request_id]
            start, end = row.start, row.num_computed_tokens
            planned_start, planned_end = row.num_planned_tokens - num_tokens, row.num_planned_tokens
            steps = plan.states.get(request_id)
            if steps is None:
                assert row.state_slot is not None, f"{request_id} has no state slot"
                steps = StateSteps(row.state_slot, ((planned_end, row.state_slot),))
            if start == 0:
                assert steps.read == -1, f"{request_id} begins with a state"
            else:
                assert not row.num_pending or steps.read == row.state_slot, f"{request_id} leaves pending tokens behind"
                before = start - row.num_pending
                expected = (before, row.contexts[before - 1] if before else 0)
                found = self._states[steps.read]
                assert found is not None
                assert found[:2] == expected, f"{request_id} reads another state in slot {steps.read}"
                assert found[2] >= row.weights_epoch, f"{request_id} reads what other weights computed"
                reads[steps.read] = request_id
            positions = [position for position, _ in steps.writes]
            assert positions == sorted(set(positions))
            assert planned_start < positions[0]
            assert positions[-1] == planned_end
            if len(positions) > 1:
                assert not row.drafts.planned, f"{request_id} has a checkpoint among drafts"
                assert planned_start == start, f"{request_id} has a checkpoint at a position that only workers know"
            # The states behind drafts are not written: the row's last write is of those before it.
            positions[-1] = start if row.drafts.planned else end
            for position, (_, slot) in zip(positions, steps.writes, strict=True):
                assert slot not in writes, f"{request_id} and {writes[slot]} write slot {slot}"
                writes[slot] = request_id
                states[slot] = (position, row.contexts[position - 1] if position else 0, self.weights_epoch)
            row.state_slot, row.num_pending = steps.writes[-1][1], end - positions[-1]
        for slot in reads.keys() & writes.keys():
            assert reads[slot] == writes[slot], f"{reads[slot]} reads slot {slot}, which {writes[slot]} writes"
        self._states = states

    def _constrained_rows(self, plan: SchedulerOutput) -> list[int]:
        rows = [self.rows[request_id] for request_id in plan.num_scheduled_tokens]
        return [index for index, row in enumerate(rows) if row.samples and row.params.grammar is not None]

    def _add_row(
        self, output: ModelRunnerOutput, request_id: str, row: FakeRow, allowed: Mapping[int, Collection[int]]
    ) -> None:
        if row.pooling is not None:
            output.others[request_id] = RowOutput(pooled=row.pool())
            return
        sampled = self._sample(row, allowed)
        result = RowOutput(sampled, drafts=row.drafts if row.drafts.planned else None)
        self._add_logprobs(result, row)
        if result == RowOutput(sampled) and len(sampled) == 1:
            output.plain_token_ids += sampled
        else:
            output.others[request_id] = result

    def _sample(self, row: FakeRow, allowed: Mapping[int, Collection[int]]) -> list[int]:
        """`allowed`: by place."""
        if not row.samples:
            return []
        place = len(row.accepted)
        for before, token_id in enumerate(row.accepted):
            context = row.contexts[before - place - 1]
            assert before not in allowed or choose(context, allowed[before]) == token_id, "a mask refuses a right draft"
        token_id = choose(row.contexts[-1], allowed[place]) if place in allowed else next_token(row.contexts[-1])
        row.contexts.append(fingerprint(row.contexts[-1], token_id))
        return [*row.accepted, token_id]

    def _add_logprobs(self, result: RowOutput, row: FakeRow) -> None:
        if row.params.logprobs is not None:
            result.logprobs = [TokenLogprobs(token_id, -1.0, 1) for token_id in result.sampled_token_ids]
        if row.params.prompt_logprobs is not None:
            first = row.start + 1  # a position's logits are of the token after it
            last = min(row.num_computed_tokens, row.num_prompt_tokens - 1)
            if first <= last:
                # The rank says the position, so that a test sees which tokens were told.
                result.prompt_logprobs = [TokenLogprobs(0, -1.0, position) for position in range(first, last + 1)]
                result.prompt_logprobs_end = last
