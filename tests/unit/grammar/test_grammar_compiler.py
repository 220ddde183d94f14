"""The compiler's queue and cache, with a build function that finishes when the test says so."""

import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest
from llguidance import LLMatcher, LLTokenizer
from prometheus_client.core import Metric

from proa.contract import Grammar
from proa.grammar import GrammarError
from proa_engine.core.grammar import GrammarReady
from proa_engine.grammar import LLGuidanceGrammars, QueueLimits, compiler
from proa_engine.grammar.build import TooComplex
from proa_engine.grammar.compiler import GrammarCompiler
from proa_engine.grammar.stats import GrammarStats
from support.llguidance_engine import EOS, SECONDS, TOKENIZER, llguidance_grammars, make_request, prepare

BIG = "x" * compiler.SMALL_BYTES
THINK: int = TOKENIZER.encode("<think>").ids[0]


class Run:
    """A compiler whose texts are compiled when `release` has their number, and named by `started`."""

    def __init__(self, *, max_jobs: int = 3) -> None:
        self.now = 0.0
        self.stats = GrammarStats()
        self.started: SimpleQueue[str] = SimpleQueue()
        self.answers: SimpleQueue[GrammarReady] = SimpleQueue()
        self._release = threading.Semaphore(0)
        self._tokenizer = LLTokenizer(TOKENIZER.to_str(), eos_token=EOS)
        self.compiler = GrammarCompiler(self._build, self.stats, QueueLimits(max_jobs, 5.0), lambda: self.now)

    def _build(self, text: str) -> LLMatcher:
        self.started.put(text)
        assert self._release.acquire(timeout=SECONDS)
        if text.startswith("bad"):
            raise GrammarError("a bad grammar")
        if text.startswith("bug"):
            raise KeyError(text)
        if text.startswith("complex"):
            raise TooComplex
        return LLMatcher(self._tokenizer, 'start: "ab" "c"', log_level=0)

    def prepare(self, text: str, request_id: str = "r", resumed: str = "") -> bool:
        """Whether the cursor came at once."""
        request = make_request(text, request_id=request_id, resumed=resumed)
        cursor = self.compiler.prepare(request, self.answers.put)
        return cursor is not None

    def release(self, count: int = 1) -> None:
        self._release.release(count)

    def answer(self) -> GrammarReady:
        return self.answers.get(timeout=SECONDS)

    def compile(self, text: str) -> GrammarReady:
        assert not self.prepare(text)
        self.release()
        return self.answer()


@pytest.fixture
def run() -> Iterator[Run]:
    run = Run()
    yield run
    run.release(1000)
    run.compiler.close()


def sample(stats: GrammarStats, name: str, **labels: str) -> float:
    families: list[Metric] = list(stats.families({}))
    samples = [each for family in families for each in family.samples if each.name == name and each.labels == labels]
    return samples[0].value


def test_compiled_grammar_is_kept_and_each_request_has_its_own_cursor(run: Run) -> None:
    first = run.compile("g")
    second = run.compiler.prepare(make_request("g"), run.answers.put)

    assert first.request_id == "r"
    assert first.cursor is not None
    assert second is not None
    for token_id in TOKENIZER.encode("abc").ids:
        assert first.cursor.accept(token_id)
    assert first.cursor.is_complete
    assert not second.is_complete
    assert sample(run.stats, "proa_engine_grammar_cache_hits_total") == 1
    assert sample(run.stats, "proa_engine_grammar_cache_queries_total") == 2
    assert sample(run.stats, "proa_engine_grammar_compile_duration_seconds_count") == 1


def test_requests_for_one_text_are_one_job(run: Run) -> None:
    for index in range(20):
        assert not run.prepare("g", str(index))
    run.release()

    assert {run.answer().request_id for _ in range(20)} == {str(index) for index in range(20)}
    assert run.started.qsize() == 1


@pytest.mark.parametrize(
    ("text", "error", "reason"),
    [
        ("bad", "a bad grammar", "invalid"),
        ("complex", "the grammar is too complex", "too_complex"),
        ("bug", "the grammar cannot be compiled", "invalid"),
    ],
)
def test_refusal_is_kept_too_and_the_thread_goes_on(run: Run, text: str, error: str, reason: str) -> None:
    first = run.compile(text)
    assert not run.prepare(text)
    second = run.answer()

    assert (first.cursor, first.error, first.retryable) == (None, error, False)
    assert (second.cursor, second.error, second.retryable) == (None, error, False)
    assert sample(run.stats, "proa_engine_grammar_refusals_total", reason=reason) == 2
    assert all(run.compile(f"g{index}").cursor for index in range(4))  # both threads still work


def test_large_text_does_not_hold_up_small_ones(run: Run) -> None:
    for text in (BIG + "1", BIG + "2", "small"):
        assert not run.prepare(text, text)

    assert {run.started.get(timeout=SECONDS) for _ in range(2)} == {BIG + "1", "small"}
    assert run.started.empty()
    run.release(3)
    assert {run.answer().request_id for _ in range(3)} == {BIG + "1", BIG + "2", "small"}


def test_full_queue_refuses_with_a_retry(run: Run) -> None:
    for text in (BIG, "small"):
        assert not run.prepare(text)
        run.started.get(timeout=SECONDS)
    for index in range(3):
        assert not run.prepare(f"queued {index}")
    assert run.answers.empty()

    assert not run.prepare("one more", "refused")
    answer = run.answer()
    assert (answer.request_id, answer.retryable) == ("refused", True)
    assert not run.prepare("queued 1", "joins a job")
    run.release(10)
    assert all(run.answer().cursor is not None for _ in range(6))
    assert sample(run.stats, "proa_engine_grammar_refusals_total", reason="queue_full") == 1


def test_job_that_waited_too_long_is_refused_with_a_retry_and_not_kept(run: Run) -> None:
    assert not run.prepare(BIG, "running")
    run.started.get(timeout=SECONDS)
    assert not run.prepare(BIG + "late", "late")
    run.now = 5.1
    run.release()

    assert run.answer().cursor is not None
    answer = run.answer()
    assert (answer.request_id, answer.cursor, answer.retryable) == ("late", None, True)
    assert run.compile(BIG + "late").cursor is not None


def test_resumed_tokens_are_consumed_on_a_compiler_thread_also_on_a_hit(run: Run) -> None:
    assert run.compile("g").cursor is not None
    assert not run.prepare("g", resumed="abc")
    done = run.answer().cursor
    assert not run.prepare("g", resumed="ab")
    half = run.answer().cursor
    assert not run.prepare("g", resumed="ax")
    wrong = run.answer()

    assert done is not None
    assert done.is_complete
    assert half is not None
    assert not half.is_complete
    assert half.accept(TOKENIZER.encode("c").ids[0])
    assert (wrong.cursor, wrong.error) == (None, "resumed_token_ids do not match the grammar")
    assert run.started.qsize() == 1


def test_least_recently_used_grammars_are_dropped(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compiler, "CACHE_ENTRIES", 2)
    for text in ("a", "b"):
        run.compile(text)
    assert run.prepare("a")
    run.compile("c")
    assert run.prepare("a")
    assert not run.prepare("b")
    run.release()
    run.answer()

    monkeypatch.setattr(compiler, "CACHE_BYTES", 10)
    run.compile("0123456789")
    assert run.prepare("0123456789")
    run.compile("01234567890")
    assert not run.prepare("01234567890")


def test_close_ends_the_threads() -> None:
    before = set(threading.enumerate())
    run = Run()
    run.compiler.close()

    assert set(threading.enumerate()) <= before


@pytest.fixture(scope="module")
def grammars() -> Iterator[LLGuidanceGrammars]:
    with llguidance_grammars() as made:
        yield made


def test_free_part_of_resumed_tokens_is_not_given_to_the_grammar(grammars: LLGuidanceGrammars) -> None:
    grammar = Grammar(text='start: "abc"', start_after=(THINK,))
    ready = prepare(grammars, make_request(grammar, resumed="anything <think>ab"))

    assert ready.cursor is not None
    assert not ready.cursor.is_complete
    assert ready.cursor.accept(TOKENIZER.encode("c").ids[0])
    assert ready.cursor.is_complete


@pytest.mark.parametrize("text", ['start: "é', "start: missing", " ", '{"grammars": []}', 'start: "a" | <[9999]>'])
def test_invalid_grammar_is_refused_with_a_sentence(
    grammars: LLGuidanceGrammars, text: str, capfd: pytest.CaptureFixture[str]
) -> None:
    ready = prepare(grammars, make_request(text))

    assert ready.cursor is None
    assert ready.error
    assert "\n" not in ready.error
    assert capfd.readouterr() == ("", "")


def hammer(grammars: LLGuidanceGrammars, texts: list[str]) -> Callable[[], None]:
    def prepare_all() -> None:
        for text in texts:
            assert prepare(grammars, make_request(text)).cursor is not None

    return prepare_all


def test_requests_from_several_threads(grammars: LLGuidanceGrammars) -> None:
    texts = [f'start: "{index % 7} text"' for index in range(60)]
    threads = [threading.Thread(target=hammer(grammars, texts)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
        assert not thread.is_alive()
