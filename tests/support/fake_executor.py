"""FakeExecutor: a device made of lists, which believes nothing that the core tells it.

It keeps what a worker keeps (tokens, block tables, slots) and a paged cache whose every slot remembers which token, in
which context, was written there. Each planned step reads the whole context of each row back, so that a block given to
two requests, a prefix found by mistake or a position computed twice or never fails at once, with a sentence.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from proa.contract import SamplingParams, TokenLogprobs
from proa_engine.core.grammar import GrammarMasks
from proa_engine.core.types import CachedRequestData, Drafts, ModelRunnerOutput, NewRequestData, SchedulerOutput

_MODULUS = 2**61 - 1
VOCAB_SIZE = 61
NO_DRAFTS = Drafts(0, 0)


def fingerprint(before: int, token_id: int) -> int:
    """Names a token in its context: equal exactly where all tokens up to here are."""
    return (before * 1_000_003 + token_id + 1) % _MODULUS


def next_token(context: int) -> int:
    """The token that the fake model says after this context."""
    return (context ^ context >> 29) % VOCAB_SIZE


def choose(context: int, allowed: Collection[int]) -> int:
    """The token that the fake model says if it must be one of `allowed`; 0 if none is."""
    first = next_token(context)
    return min(allowed, key=lambda token_id: (token_id - first) % VOCAB_SIZE, default=0)


def allowed_by_row(masks: GrammarMasks | None) -> dict[int, set[int]]:
    if masks is None:
        return {}
    assert masks.bits.format == "i"
    num_words = -(-VOCAB_SIZE // 32)
    assert masks.bits.shape == (len(masks.rows), num_words)
    words = list(masks.bits.cast("B").cast("i"))
    of_row = [words[start : start + num_words] for start in range(0, len(words), num_words)]
    return {
        row: {token_id for token_id in range(VOCAB_SIZE) if bits[token_id // 32] >> token_id % 32 & 1}
        for row, bits in zip(masks.rows, of_row, strict=True)
    }


def generate(prompt: Sequence[int], params: SamplingParams, eos_token_ids: frozenset[int], limit: int) -> list[int]:
    """What a request must produce, said without any scheduling: at most `limit` tokens of prompt and output."""
    context, output = 0, list[int]()
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


@dataclass
class FakeRow:
    """What a worker knows of a request."""

    contexts: list[int]  # fingerprint at each token, sampled ones included
    num_prompt_tokens: int
    num_computed_tokens: int
    block_ids: list[int]
    params: SamplingParams
    num_planned_tokens: int = 0  # the most that can have been computed, as the plan says before each step
    start: int = 0  # of the step's tokens
    accepted: list[int] = field(default_factory=list)  # of the step's drafts
    drafts: Drafts = NO_DRAFTS

    @property
    def samples(self) -> bool:
        """Whether the step computes the last of its tokens."""
        return self.num_computed_tokens == len(self.contexts)


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
    """

    num_blocks: int = 64
    block_size: int = 4
    max_num_seqs: int = 256
    max_in_flight: int = 2
    on_execute: Callable[[], None] | None = None
    while_waiting: Callable[[], None] | None = None
    fail_at: int | None = None
    accept: Callable[[int], int] | None = None
    disobeys: set[str] = field(default_factory=set)
    plans: list[SchedulerOutput] = field(default_factory=list)
    log: list[tuple[str, int]] = field(default_factory=list)
    rows: dict[str, FakeRow] = field(default_factory=dict)
    num_in_flight: int = 0
    is_shut_down: bool = False
    _started: SchedulerOutput | None = None

    def __post_init__(self) -> None:
        self._cache: list[list[int | None]] = [[None] * self.block_size for _ in range(self.num_blocks)]

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
        self._apply(plan)
        for request_id, num_tokens in plan.num_scheduled_tokens.items():
            self._write(request_id, num_tokens)
        for request_id in plan.num_scheduled_tokens:
            self._read_back(request_id)

    def sample_tokens(self, masks: GrammarMasks | None = None) -> FakeFuture:
        plan, self._started = self._started, None
        assert plan is not None, "execute_model must come first"
        if plan.grammar_rows:
            self.log.append(("mask", plan.step))
        assert plan.grammar_rows == self._constrained_rows(plan)
        allowed = allowed_by_row(masks)
        assert list(allowed) == sorted(allowed)
        assert allowed.keys() <= set(plan.grammar_rows)
        output = ModelRunnerOutput(plain_token_ids=[])
        for index, request_id in enumerate(plan.num_scheduled_tokens):
            of_row = None if request_id in self.disobeys else allowed.get(index)
            self._add_row(output, request_id, self.rows[request_id], of_row)
        error = RuntimeError(f"step {plan.step} failed") if plan.step == self.fail_at else None
        return FakeFuture(output, lambda: self._reach_host(plan.step), error)

    def sleep(self, level: int) -> None:
        assert not self.rows, "requests are unfinished"
        assert self.num_in_flight == 0
        self.log.append(("sleep", level))
        self._cache = []

    def wake_up(self) -> None:
        assert not self._cache, "the executor is awake"
        self.log.append(("wake up", 0))
        self._cache = [[None] * self.block_size for _ in range(self.num_blocks)]

    def shutdown(self) -> None:
        self.is_shut_down = True

    def _reach_host(self, step: int) -> None:
        self.log.append(("host", step))
        self.num_in_flight -= 1
        if self.while_waiting is not None:
            self.while_waiting()

    def _apply(self, plan: SchedulerOutput) -> None:
        for request_id in [*plan.finished_request_ids, *plan.preempted_request_ids]:
            assert request_id in self.rows, f"{request_id} is forgotten twice, or was never known"
            del self.rows[request_id]
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
        contexts, context = list[int](), 0
        for token_id in new.token_ids:
            context = fingerprint(context, token_id)
            contexts.append(context)
        self.rows[new.request_id] = FakeRow(
            contexts,
            new.num_prompt_tokens,
            new.num_computed_tokens,
            list(new.block_ids[0]),
            new.sampling_params,
            new.num_computed_tokens,
        )

    def _update(self, known: CachedRequestData) -> None:
        row = self.rows[known.request_id]
        surplus = known.num_computed_tokens - row.num_computed_tokens
        most = 0 if self.accept is None else row.drafts.planned - len(row.accepted)
        assert 0 <= surplus <= most, f"{known.request_id}: a position is skipped"
        row.num_planned_tokens = known.num_computed_tokens
        row.block_ids += known.new_block_ids[0] if known.new_block_ids else ()
        assert len(set(row.block_ids)) == len(row.block_ids), f"{known.request_id} has a block twice"

    def _write(self, request_id: str, num_tokens: int) -> None:
        row = self.rows[request_id]
        end = row.num_planned_tokens + num_tokens
        assert num_tokens > 0, f"{request_id} has an empty row"
        max_tokens = row.params.max_tokens
        assert max_tokens is None or end < row.num_prompt_tokens + max_tokens, f"{request_id} is planned past its limit"
        assert end <= len(row.block_ids) * self.block_size, f"{request_id} has no slot for a token"
        row.start = row.num_computed_tokens
        row.num_computed_tokens = min(row.start + num_tokens, len(row.contexts))
        self._check_drafts(request_id, row, num_tokens - (row.num_computed_tokens - row.start))
        row.num_planned_tokens = end
        for position in range(row.start, row.start + num_tokens):
            block_id = row.block_ids[position // self.block_size]
            is_right = position < row.num_computed_tokens
            self._cache[block_id][position % self.block_size] = row.contexts[position] if is_right else None

    def _check_drafts(self, request_id: str, row: FakeRow, num_drafts: int) -> None:
        """Of a row's tokens so many do not exist yet: drafts, some of which turn out to be right."""
        row.accepted = []
        row.drafts = Drafts(num_drafts, num_drafts)
        if num_drafts == 0:
            return
        assert self.accept is not None, f"{request_id} computes a token that does not exist"
        assert row.num_computed_tokens == row.start + 1, f"{request_id} has drafts beside more than its last token"
        for _ in range(self.accept(num_drafts)):
            row.accepted.append(next_token(row.contexts[-1]))
            row.contexts.append(fingerprint(row.contexts[-1], row.accepted[-1]))
        row.num_computed_tokens += len(row.accepted)

    def _read_back(self, request_id: str) -> None:
        row = self.rows[request_id]
        size = self.block_size
        for index in range(-(-row.num_computed_tokens // size)):
            expected = row.contexts[index * size : min((index + 1) * size, row.num_computed_tokens)]
            found = self._cache[row.block_ids[index]][: len(expected)]
            assert found == expected, f"{request_id} reads another's tokens in block {row.block_ids[index]}"

    def _constrained_rows(self, plan: SchedulerOutput) -> list[int]:
        rows = [self.rows[request_id] for request_id in plan.num_scheduled_tokens]
        return [index for index, row in enumerate(rows) if row.samples and row.params.grammar is not None]

    def _add_row(
        self, output: ModelRunnerOutput, request_id: str, row: FakeRow, allowed: Collection[int] | None
    ) -> None:
        sampled = self._sample(row, allowed)
        self._add_logprobs(output, request_id, row, sampled)
        if row.drafts.planned:
            output.drafts[request_id] = row.drafts
        if len(sampled) == 1 and not any(
            request_id in of_row for of_row in (output.drafts, output.logprobs, output.prompt_logprobs)
        ):
            output.plain_token_ids.append(sampled[0])
        else:
            output.sampled_token_ids[request_id] = sampled

    def _sample(self, row: FakeRow, allowed: Collection[int] | None) -> list[int]:
        if not row.samples:
            return []
        token_id = next_token(row.contexts[-1]) if allowed is None else choose(row.contexts[-1], allowed)
        row.contexts.append(fingerprint(row.contexts[-1], token_id))
        return [*row.accepted, token_id]

    def _add_logprobs(self, output: ModelRunnerOutput, request_id: str, row: FakeRow, sampled: list[int]) -> None:
        if row.params.logprobs is not None and sampled:
            output.logprobs[request_id] = [TokenLogprobs(token_id, -1.0, 1) for token_id in sampled]
        if row.params.prompt_logprobs is not None:
            first = row.start + 1  # a position's logits are of the token after it
            last = min(row.num_computed_tokens, row.num_prompt_tokens - 1)
            if first <= last:
                # The rank says the position, so that a test sees which tokens were told.
                output.prompt_logprobs[request_id] = [
                    TokenLogprobs(0, -1.0, position) for position in range(first, last + 1)
                ]
