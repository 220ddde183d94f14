"""GrammarCompiler's queue: what is compiled, for whom, and what is not any more."""

import threading
from queue import SimpleQueue

import pytest
from llguidance import LLMatcher, LLTokenizer

from proa.contract import EngineCoreRequest, Grammar, SamplingParams
from proa_engine.core.grammar import GrammarReady
from proa_engine.grammar.compiled import CompiledGrammar, GrammarCache
from proa_engine.grammar.compiler import GrammarCompiler, QueueLimits
from proa_engine.grammar.stats import GrammarStats
from support.tokenizers import byte_level_tokenizer

TOKENIZER = LLTokenizer(byte_level_tokenizer().to_str(), eos_token=0)
LARGE = "start: " + '"a" ' * 4000  # has one thread


class Builder:
    """Builds a text once it is allowed to; `started` has those that it was asked for."""

    def __init__(self) -> None:
        self.started: SimpleQueue[str] = SimpleQueue()
        self.gate = threading.Semaphore(0)

    def __call__(self, text: str) -> CompiledGrammar:
        self.started.put(text)
        assert self.gate.acquire(timeout=10)
        return CompiledGrammar(LLMatcher(TOKENIZER, 'start: "a"', log_level=0))


class Queue:
    def __init__(self, max_jobs: int = 64, max_seconds: float = 100.0) -> None:
        self.builder = Builder()
        self.answers: SimpleQueue[GrammarReady] = SimpleQueue()
        self.compiler = GrammarCompiler(
            self.builder, GrammarStats(), QueueLimits(max_jobs, max_seconds), GrammarCache()
        )
        self.aborted: set[str] = set()

    def add(self, request_id: str, text: str, tenant: str = "") -> None:
        params = SamplingParams(grammar=Grammar(text=text))
        request = EngineCoreRequest(request_id=request_id, prompt_token_ids=[1], sampling_params=params, tenant=tenant)
        assert self.compiler.prepare(request, self.answers.put, lambda: request_id not in self.aborted) is None

    def finish(self) -> GrammarReady:
        """Let the next text be built."""
        self.builder.gate.release()
        return self.answers.get(timeout=10)

    def close(self) -> None:
        """Let what runs be built."""
        self.builder.gate.release(2)
        self.compiler.close()


@pytest.fixture
def queue() -> Queue:
    return Queue()


def test_what_was_aborted_in_the_queue_is_not_compiled(queue: Queue) -> None:
    for name in "abc":
        queue.add(name, LARGE + name)
    assert queue.builder.started.get(timeout=10) == LARGE + "a"
    queue.aborted.add("b")
    assert queue.finish().request_id == "a"
    assert queue.finish().request_id == "c"
    assert queue.builder.started.get(timeout=10) == LARGE + "c"
    queue.add("d", LARGE + "b")
    assert queue.finish().request_id == "d", "the text can be asked for again"
    queue.compiler.close()


def test_a_text_is_compiled_while_one_of_its_requests_is_left(queue: Queue) -> None:
    queue.add("first", LARGE)
    assert queue.builder.started.get(timeout=10) == LARGE
    queue.add("a", LARGE + "x")
    queue.add("b", LARGE + "x")
    queue.aborted.add("a")
    assert queue.finish().request_id == "first"
    queue.builder.gate.release()
    assert {queue.answers.get(timeout=10).request_id for _ in "ab"} == {"a", "b"}
    queue.compiler.close()


def test_aborted_requests_leave_a_full_queue() -> None:
    queue = Queue(max_jobs=2)
    queue.add("first", LARGE)
    assert queue.builder.started.get(timeout=10) == LARGE
    queue.add("a", LARGE + "a")
    queue.add("b", LARGE + "b")
    queue.add("refused", LARGE + "c")
    refusal = queue.answers.get(timeout=10)
    assert refusal.request_id == "refused"
    assert refusal.retryable
    queue.aborted.add("a")
    queue.add("c", LARGE + "c")
    assert [queue.finish().request_id for _ in range(3)] == ["first", "b", "c"]
    queue.compiler.close()


def test_tenants_take_turns_by_the_time_of_their_grammars(queue: Queue) -> None:
    queue.add("a0", LARGE + "0", "a")
    assert queue.builder.started.get(timeout=10) == LARGE + "0"
    for number in range(1, 4):
        queue.add(f"a{number}", LARGE + str(number), "a")
    queue.add("b1", LARGE + "b", "b")
    queue.add("b2", LARGE + "bb", "b")
    assert [queue.finish().request_id for _ in range(2)] == ["a0", "b1"]
    queue.close()


def test_a_new_tenant_takes_the_place_of_the_last_one_of_a_tenant_that_fills_the_queue() -> None:
    queue = Queue(max_jobs=3)
    queue.add("first", LARGE, "a")
    assert queue.builder.started.get(timeout=10) == LARGE
    for number in range(3):
        queue.add(f"a{number}", LARGE + str(number), "a")
    queue.add("b", LARGE + "b", "b")
    refused = queue.answers.get(timeout=10)
    assert (refused.request_id, refused.retryable) == ("a2", True)
    queue.add("a3", LARGE + "3", "a")
    assert queue.answers.get(timeout=10).request_id == "a3", "its tenant has the most already"
    assert [queue.finish().request_id for _ in range(2)] == ["first", "b"]
    queue.close()


def test_only_a_tenant_with_several_grammars_is_refused_for_the_time_that_one_has_waited() -> None:
    queue = Queue(max_seconds=-1.0)
    queue.add("a0", LARGE, "a")
    assert queue.builder.started.get(timeout=10) == LARGE
    for number in range(1, 3):
        queue.add(f"a{number}", LARGE + str(number), "a")
    queue.add("b", LARGE + "b", "b")
    answers = [queue.finish(), queue.finish()]
    assert [(each.request_id, each.retryable) for each in answers] == [("a0", False), ("b", False)]
    refused = queue.answers.get(timeout=10)
    assert (refused.request_id, refused.retryable) == ("a1", True)
    queue.close()


def test_a_tenant_whose_small_grammar_is_compiled_leaves_the_other_thread_to_others(queue: Queue) -> None:
    queue.add("a0", "0", "a")
    queue.add("a1", "1", "a")
    assert {queue.builder.started.get(timeout=10) for _ in range(2)} == {"0", "1"}
    queue.add("a2", "2", "a")
    queue.add("b", "b", "b")
    queue.builder.gate.release()
    assert queue.builder.started.get(timeout=10) == "b"
    queue.close()
