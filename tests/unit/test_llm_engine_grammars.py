"""LLMEngine: requests that wait for their grammars."""

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from proa.contract import Grammar, SamplingParams
from proa_engine.config import EngineConfig
from proa_engine.core.admission.validation import LengthLimits, ModelLimits
from proa_engine.engine_parts import EngineParts
from proa_engine.models.pooling_config import PoolingConfig
from proa_engine.offline.llm_engine import LLMEngine
from support.core import CoreRun
from support.fake_executor import VOCAB_SIZE
from support.fake_grammar import fake_grammar


def engine_over(run: CoreRun) -> LLMEngine:
    config = EngineConfig(model="m", skip_tokenizer_init=True, block_size=4)
    model_config = SimpleNamespace(pooling=PoolingConfig())
    started = SimpleNamespace(cache_groups=run.groups, model_config=model_config, eos_token_ids=frozenset())
    executor: Any = SimpleNamespace(started=started, shutdown=lambda: None)
    limits = ModelLimits(vocab_size=VOCAB_SIZE, lengths=LengthLimits(run.max_model_len), grammars=True)
    folder: Path | None = None
    return LLMEngine(config, load=lambda *_: EngineParts(config, executor, run.core, limits, folder))


def finish(engine: LLMEngine) -> dict[str, tuple[str | None, int]]:
    """Finish reason and number of output tokens of each request."""
    ends = {}
    while engine.has_unfinished_requests():
        for output in engine.step(only_finished=True):
            (choice,) = output.outputs
            ends[output.request_id] = choice.finish_reason, len(choice.token_ids)
    return ends


def test_step_waits_while_all_requests_wait_for_their_grammars() -> None:
    run = CoreRun()
    engine = engine_over(run)
    engine.add_request("a", [1, 2], SamplingParams(grammar=fake_grammar(length=3)))
    assert engine.step() == []
    assert engine.has_unfinished_requests()
    thread = threading.Timer(0.05, run.grammars.compile)
    thread.start()
    assert finish(engine) == {"a": ("stop", 3)}
    assert not thread.is_alive()


def test_step_without_requests_returns_at_once() -> None:
    assert engine_over(CoreRun()).step() == []


def test_a_request_whose_grammar_is_refused_finishes_with_an_error(caplog: pytest.LogCaptureFixture) -> None:
    run = CoreRun()
    engine = engine_over(run)
    engine.add_request("a", [1, 2], SamplingParams(grammar=Grammar(text="invalid")))
    engine.add_request("b", [1, 2], SamplingParams(max_tokens=3))
    engine.step()
    run.grammars.compile()
    assert finish(engine) == {"a": ("error", 0), "b": ("length", 3)}
    assert "invalid text" in caplog.text
