"""Blocks that one engine fetches from another give the tokens that it would compute, for every kind of cache."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from proa.contract import KvSource, SamplingParams
from proa_engine.builtin import builtin_model_folder
from proa_engine.config import PeerTls
from proa_engine.core.operations import ResetPrefixCache
from proa_engine.memory.mover_process import MoverProcess
from proa_engine.memory.rank_tiers import HostTiers
from support.cache_families import FAMILIES, assert_equal, make_cache_family
from support.certificates import signed
from support.engine import Engine, Result, build_core, request, run

CONFIG: dict[str, Any] = {
    "num_gpu_blocks_override": 100,
    "max_model_len": 256,
    "kv_offloading_size": 0.02,
    "kv_transfer_address": "127.0.0.1:0",
}
PROMPT = [*range(5, 155)]
PARAMS = SamplingParams(temperature=0.7, seed=5, max_tokens=12, ignore_eos=True, logprobs=0)


def source_of(engine: Engine, *, wait_ms: int = 20_000) -> KvSource:
    transfer = engine.executor.started.kv_transfer
    assert transfer is not None
    return KvSource(addresses=tuple(f"127.0.0.1:{port}" for port in transfer.ports), wait_ms=wait_ms)


def ask(engine: Engine, name: str, source: KvSource | None = None) -> Result:
    """Send the prompt, and let the engine store its blocks."""
    asked = replace(request(name, PROMPT, PARAMS), kv_source=source)
    (result,) = run(engine, [asked]).values()
    while engine.core.has_work():
        engine.core.step()
    return result


def kill_mover(engine: Engine) -> None:
    tiers = engine.executor._worker.tiers
    assert isinstance(tiers, HostTiers)
    mover = tiers.mover
    assert isinstance(mover, MoverProcess)
    mover._process.kill()
    mover._process.wait()


@pytest.mark.parametrize("family", FAMILIES)
def test_an_engine_continues_with_the_blocks_of_another(family: str, tmp_path: Path) -> None:
    folder = make_cache_family(tmp_path, family)
    with build_core(folder, **CONFIG) as first, build_core(folder, **CONFIG) as second:
        computed = ask(first, "a")
        fetched = ask(second, "b", source_of(first))
        assert (computed.num_cached_tokens, fetched.num_cached_tokens) == (0, 144)
        assert_equal([fetched], [computed])


def test_engines_with_certificates_exchange_blocks_with_each_other_only(tmp_path: Path) -> None:
    folder, made = builtin_model_folder(), signed(tmp_path / "certificates")
    tls = PeerTls(str(made.certificate), str(made.key), str(made.authority))
    with build_core(folder, **CONFIG, peer_tls=tls) as first:
        computed = ask(first, "a")
        with build_core(folder, **CONFIG, peer_tls=tls) as second:
            fetched = ask(second, "b", source_of(first))
        with build_core(folder, **CONFIG) as third:
            assert ask(third, "c", source_of(first)).num_cached_tokens == 0
    assert fetched.num_cached_tokens == 144
    assert_equal([fetched], [computed])


def test_a_request_cannot_name_a_source_that_the_operator_has_not_listed(tmp_path: Path) -> None:
    """Nor any source of an engine that exchanges no blocks but has a mover, for its files of host memory."""
    folder = builtin_model_folder()
    alone = {**CONFIG, "kv_transfer_address": None, "kv_offloading_path": str(tmp_path)}
    listed = {**CONFIG, "kv_transfer_sources": ("10.0.0.0/8", "proa-engine.here")}
    with build_core(folder, **CONFIG) as first:
        computed = ask(first, "a")
        for config in (alone, listed):
            with build_core(folder, **config) as second:
                asked = ask(second, "b", source_of(first))
                counts = second.core.counters().cache.fetches
            assert asked.num_cached_tokens == 0
            assert_equal([asked], [computed])
            assert counts is not None
            assert counts.num_fetches == (config is listed)
            assert counts.num_fetched_bytes == 0


def test_engines_that_differ_compute() -> None:
    folder = builtin_model_folder()
    with build_core(folder, **CONFIG) as first, build_core(folder, **CONFIG, kv_cache_dtype="fp8") as second:
        ask(first, "a")
        assert ask(second, "b", source_of(first)).num_cached_tokens == 0


def test_nothing_is_fetched_from_before_a_reset() -> None:
    folder = builtin_model_folder()
    with build_core(folder, **CONFIG) as first, build_core(folder, **CONFIG) as second:
        ask(first, "a")
        for engine in (second, first):  # the source is not reset yet, then it is empty
            engine.core.operate(ResetPrefixCache(time.time()))
            engine.core.step()
            assert ask(second, f"{engine is first}", source_of(first, wait_ms=50)).num_cached_tokens == 0
            second.core.operate(ResetPrefixCache(time.time()))


def test_a_source_whose_mover_is_killed_costs_only_time() -> None:
    folder = builtin_model_folder()
    with build_core(folder, **CONFIG) as first, build_core(folder, **CONFIG) as second:
        computed = ask(first, "a")
        kill_mover(first)
        fetched = ask(second, "b", source_of(first))
        assert fetched.num_cached_tokens == 0
        assert_equal([fetched], [computed])


def test_a_mover_that_hangs_or_dies_ends_the_jobs_that_it_has() -> None:
    folder = builtin_model_folder()
    with build_core(folder, **CONFIG) as first, build_core(folder, **CONFIG) as second:
        asked = replace(request("b", PROMPT, PARAMS), kv_source=source_of(first, wait_ms=60_000))
        second.core.submit(asked)
        second.core.step()
        assert not second.core.has_work()
        kill_mover(second)
        began = time.monotonic()
        while second.core.has_unfinished_requests():
            second.core.wait_for_work(timeout=1.0)
            second.core.step()
        assert time.monotonic() - began < 20
        second.core.check_integrity()  # no page is reserved any more
