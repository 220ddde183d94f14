"""Adapters in the core: loading, unloading, and which requests may start."""

from concurrent.futures import Future

import pytest

from proa.contract import Lora
from proa_engine.core.admission.request_queue import MAX_PASSED
from proa_engine.core.lora_store import LoraError, LoraExists, LoraInvalid, LoraNotFound, TooManyLoras
from proa_engine.core.operations import LoadLora, ResetPrefixCache, Sleep, UnloadLora, WakeUp
from support.core import CoreRun, make_request


def run_with(*names: str, max_loras: int = 2, max_cpu_loras: int = 4, max_num_seqs: int = 8) -> CoreRun:
    run = CoreRun(max_loras=max_loras, max_cpu_loras=max_cpu_loras, max_num_seqs=max_num_seqs)
    for name in names:
        run.load_lora(name).result(0)
    return run


def error_of(done: "Future[Lora]") -> BaseException | None:
    return done.exception(0)


def running(run: CoreRun) -> set[str]:
    return set(run.batches()[-1])


def test_a_loaded_adapter_is_named_by_requests_until_it_is_unloaded() -> None:
    run = run_with()
    request = make_request("1", lora_name="a")
    run.submit(request)
    lora = run.load_lora("a", "path").result(0)
    assert lora == Lora(name="a", path="path", digest="path")
    accepted = make_request("2", lora_name="a", lora_digest="path")
    run.submit(accepted, make_request("3", lora_name="a", lora_digest="other"))
    run.finish()
    assert run.tokens("2") == run.expected(accepted)
    assert run.tokens("2") != run.expected(make_request("2"))
    run.core.operate(UnloadLora("a")).add_done_callback(lambda done: done.result(0))
    run.submit(make_request("4", lora_name="a"))
    run.finish()
    assert [(each.request_id, each.code) for each in run.rejections] == [(name, "not_found") for name in "134"]
    assert run.lora_sets == [["a"], []]
    assert run.executor.loras == {}


def test_a_request_without_digest_gets_the_content_of_the_moment_and_keeps_it() -> None:
    run = run_with(max_cpu_loras=3)
    run.load_lora("a", "old").result(0)
    run.submit(make_request("1", lora_name="a", max_tokens=20))
    run.step()
    assert run.load_lora("a", "new", replace=True).result(0).digest == "new"
    run.submit(make_request("2", lora_name="a", max_tokens=20))
    run.finish()
    for name, digest in (("1", "old"), ("2", "new")):
        assert run.tokens(name) == run.expected(make_request(lora_digest=digest, max_tokens=20))
    assert list(run.executor.loras.values()) == ["new"]


def test_blocks_are_not_shared_between_adapters_of_one_name_or_with_none() -> None:
    run = run_with("a")
    prompt = list(range(20))
    for digest in ("", "a", "b"):
        run.load_lora("a", digest or "a", replace=True).result(0)
        for round_ in range(2):
            request = make_request(f"{digest}{round_}", prompt, lora_name="a" if digest else "", lora_digest=digest)
            run.submit(request)
            run.finish()
            assert run.last(request.request_id).num_cached_tokens == (16 if round_ else 0)
            run.assert_complete([request])


def test_loading_the_same_content_again_changes_nothing() -> None:
    run = run_with("a")
    assert run.load_lora("a", "a").result(0).path == "a"
    assert list(run.executor.loras.values()) == ["a"]
    assert run.lora_sets == [["a"]]


def test_another_content_needs_replace() -> None:
    run = run_with("a")
    assert isinstance(error_of(run.load_lora("a", "other")), LoraExists)
    assert list(run.executor.loras.values()) == ["a"]


@pytest.mark.parametrize(
    ("name", "path", "error"), [("", "a", LoraInvalid), ("a", "", LoraInvalid), ("a", "missing", LoraNotFound)]
)
def test_what_cannot_be_loaded_is_answered_and_leaves_nothing(name: str, path: str, error: type[LoraError]) -> None:
    run = run_with()
    done = run.core.operate(LoadLora(name, path))
    run.step()
    if run.executor.lora_reads:
        run.executor.read_lora()
        run.step()
    assert isinstance(error_of(done), error)
    assert run.load_lora("b").result(0).name == "b"


def test_unloading_an_unknown_name_is_not_found() -> None:
    run = run_with("a")
    done = run.core.operate(UnloadLora("b"))
    run.step()
    assert isinstance(done.exception(0), LoraNotFound)


def test_an_engine_without_adapters_refuses_to_load_one() -> None:
    run = CoreRun()
    assert isinstance(error_of(run.load_lora("a")), LoraInvalid)


def test_the_least_recently_used_adapter_without_requests_makes_room() -> None:
    run = run_with("a", "b", "c", max_cpu_loras=3)
    run.submit(make_request("1", lora_name="b", max_tokens=100), make_request("2", lora_name="a"))
    run.step()
    run.load_lora("d").result(0)
    assert run.lora_sets[-1] == ["a", "b", "d"]


def test_no_adapter_is_loaded_if_all_others_have_requests() -> None:
    run = run_with("a", "b", max_cpu_loras=2)
    run.submit(make_request("1", lora_name="a", max_tokens=100), make_request("2", lora_name="b", max_tokens=100))
    run.step()
    assert isinstance(error_of(run.load_lora("c")), TooManyLoras)
    run.core.operate(UnloadLora("a"))
    run.step()
    assert isinstance(error_of(run.load_lora("c")), TooManyLoras), "its request still needs its memory"
    run.core.abort(["1"])
    assert run.load_lora("c").result(0).name == "c"


def test_adapters_are_read_one_after_another_beside_steps() -> None:
    run = run_with()
    calls = [run.core.operate(LoadLora(name, name)) for name in ("a", "b")]
    run.submit(make_request("1", max_tokens=4))
    run.finish()
    assert not any(done.done() for done in calls)
    assert not run.core.has_work()
    run.executor.read_lora()
    assert run.core.has_work()
    run.step()
    assert [done.done() for done in calls] == [True, False]
    run.executor.read_lora()
    run.step()
    assert run.lora_sets[-1] == ["a", "b"]


def test_a_request_that_waits_for_a_slot_does_not_stop_those_behind_it() -> None:
    run = run_with("a", "b", max_loras=1)
    names = {"1": "a", "2": "b", "3": "a", "4": "", "5": "b"}
    run.submit(*(make_request(key, lora_name=name, lora_digest=name, max_tokens=20) for key, name in names.items()))
    run.step()
    assert running(run) == {"1", "3", "4"}
    assert run.core.counters().num_deferred_reqs == 2
    run.finish()
    run.assert_complete(make_request(key, lora_digest=name, max_tokens=20) for key, name in names.items())


def test_an_idle_adapter_keeps_its_slot_until_another_needs_it() -> None:
    run = run_with("a", "b", "c", max_loras=2)
    for index, name in enumerate("abaca"):
        run.submit(make_request(f"{index}", lora_name=name))
        run.finish()
    assert run.executor.num_slot_fills == 3, "c takes the slot of b, which is idle for longer than that of a"


def test_a_starving_adapter_gets_a_slot_though_others_have_steady_traffic() -> None:
    run = run_with("a", "b", max_loras=1, max_num_seqs=4)
    run.submit(make_request("a", lora_name="a", max_tokens=4))
    run.step()
    run.submit(make_request("starving", lora_name="b"))
    for index in range(4 * MAX_PASSED):
        run.submit(make_request(f"a{index}", lora_name="a", max_tokens=4))
    passed = 0
    while not run.outputs.get("starving"):
        run.step()
        passed = sum(name.startswith("a") for name in run.outputs)
    assert MAX_PASSED <= passed <= MAX_PASSED + 5
    run.finish()


def test_requests_before_a_starving_one_still_start() -> None:
    run = CoreRun(max_loras=1, max_cpu_loras=2, policy="priority", max_num_seqs=4)
    run.load_lora("a")
    run.load_lora("b")
    run.submit(make_request("a", lora_name="a", max_tokens=100))
    run.step()
    run.submit(make_request("starving", lora_name="b"))
    run.submit(*(make_request(f"late{index}", lora_name="a", max_tokens=2) for index in range(MAX_PASSED + 8)))
    for _ in range(60):
        run.step()
    assert sum(name.startswith("late") for name in run.outputs) == MAX_PASSED
    run.submit(make_request("urgent", lora_name="a", priority=-1, max_tokens=2))
    run.steps(4)
    assert run.tokens("urgent")
    run.finish()


def test_slots_are_filled_again_after_sleep() -> None:
    run = run_with("a")
    request = make_request("1", lora_name="a", lora_digest="a")
    run.submit(request)
    run.finish()
    run.core.operate(Sleep(1))
    run.step()
    run.core.operate(WakeUp())
    run.step()
    run.submit(make_request("2", lora_name="a", lora_digest="a"))
    run.finish()
    assert run.tokens("2") == run.expected(request)
    assert run.executor.num_slot_fills == 2


def test_a_reset_of_the_prefix_cache_keeps_slots() -> None:
    run = run_with("a")
    for name in "12":
        run.submit(make_request(name, lora_name="a"))
        run.finish()
        run.core.operate(ResetPrefixCache())
        run.step()
    assert run.executor.num_slot_fills == 1


@pytest.mark.parametrize("name", ["a,b", "a\nb", "a" * 257])
def test_a_name_that_labels_and_logs_cannot_hold_is_refused(name: str) -> None:
    error = error_of(run_with().load_lora(name))
    assert isinstance(error, LoraInvalid)
    assert "printable characters" in str(error)
