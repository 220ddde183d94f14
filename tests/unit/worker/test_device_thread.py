"""DeviceThread: jobs run in order, on its thread or on a waiting one, and none is lost between the two."""

from threading import Event, Thread, current_thread, get_ident

import pytest

from proa_engine.step.device_thread import DeviceThread, run_beside_steps

DEADLINE = 10.0


def wait_for_gate(began: Event, gate: Event) -> None:
    began.set()
    gate.wait(DEADLINE)


def test_jobs_run_in_order_on_any_thread() -> None:
    device, order = DeviceThread("device"), list[int]()
    gate = Event()
    device.submit(lambda: gate.wait(DEADLINE))
    for number in range(5):
        device.submit(lambda number=number: order.append(number), wake=number % 2 == 0)  # type: ignore[misc]
    gate.set()
    device.submit(lambda: None).result(DEADLINE)
    assert order == [0, 1, 2, 3, 4]
    assert device.close(DEADLINE)


def test_a_job_that_does_not_wake_the_thread_is_run_by_help() -> None:
    device = DeviceThread("device")
    ran = device.submit(get_ident, wake=False)
    assert not ran.done()
    device.help(ran)
    assert ran.result(DEADLINE) == get_ident()
    assert device.close(DEADLINE)


def test_a_job_that_wakes_the_thread_is_not_run_by_help() -> None:
    device, threads = DeviceThread("device"), list[int]()
    for _ in range(200):  # help often gets to run before the thread does
        waking = device.submit(get_ident)
        last = device.submit(lambda: 7, wake=False)
        device.help(last)
        assert last.result(DEADLINE) == 7
        threads.append(waking.result(DEADLINE))
    assert get_ident() not in threads
    assert device.close(DEADLINE)


def test_jobs_after_the_awaited_one_stay_queued() -> None:
    """Whether or not the thread was busy with an earlier one; otherwise it would run every later small step too."""
    device, began, gate = DeviceThread("device"), Event(), Event()
    large = device.submit(lambda: wait_for_gate(began, gate))
    assert began.wait(DEADLINE)
    first, second, third = (device.submit(get_ident, wake=False) for _ in range(3))
    device.help(first)
    gate.set()
    large.result(DEADLINE)
    assert first.result(DEADLINE) != get_ident()
    assert not second.done()
    while not second.done():  # the thread may still be stopping
        device.help(second)
    assert not third.done()
    device.help(third)
    assert third.result(DEADLINE) == get_ident()
    assert device.close(DEADLINE)


def test_queued_jobs_are_run_on_close() -> None:
    device = DeviceThread("device")
    ran = device.submit(lambda: 7, wake=False)
    assert device.close(DEADLINE)
    assert ran.result(0) == 7


def test_a_job_runs_if_help_is_called_while_the_thread_stops() -> None:
    """Repeated to hit the moment at which the thread stops running jobs."""
    device = DeviceThread("device")
    for _ in range(2000):
        device.submit(lambda: None)
        last = device.submit(lambda: 7, wake=False)
        device.help(last)
        assert last.result(DEADLINE) == 7
    assert device.close(DEADLINE)


def test_help_does_not_wait_for_a_job_that_hangs() -> None:
    device, began, gate = DeviceThread("device"), Event(), Event()
    device.submit(lambda: wait_for_gate(began, gate))
    assert began.wait(DEADLINE)
    waiting = device.submit(lambda: None, wake=False)
    helper = Thread(target=device.help, args=(waiting,))
    helper.start()
    helper.join(DEADLINE / 2)
    assert not helper.is_alive()
    gate.set()
    assert device.close(DEADLINE)


def test_work_beside_the_steps_has_a_thread_that_ends_with_it() -> None:
    thread = run_beside_steps(current_thread, "beside").result(DEADLINE)
    thread.join(DEADLINE)
    assert not thread.is_alive()
    with pytest.raises(ZeroDivisionError):
        run_beside_steps(lambda: 1 // 0, "beside").result(DEADLINE)
