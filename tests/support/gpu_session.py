"""A pytest plugin for tests on a GPU: a broken device ends the process, engines start without a compile pool, and what
runs in bfloat16 comes first.

After an illegal access every later call of the process fails, so that it would fail all tests behind the one at fault.
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from proa_engine.config import EngineConfig
    from proa_engine.worker.worker import Worker

_BROKEN_DEVICE = 3  # exit status


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--enforce-eager", action="store_true", help="engines capture no CUDA graphs")
    parser.addoption("--known", action="append", default=[], metavar="FILE::TEST", help="do not run this test")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    import proa_engine.executor.uniproc  # noqa: F401 - here, where no test waits for it

    known = set(config.getoption("--known"))
    items[:] = [item for item in items if f"{item.path.name}::{item.nodeid.partition('::')[2]}" not in known]
    items.sort(key=is_in_another_dtype)


def is_in_another_dtype(item: pytest.Item) -> bool:
    """Whether a test computes in another type than bfloat16, in which models are served."""
    import torch

    dtype = (
        item.callspec.params.get("dtype") if isinstance(item, pytest.Function) and hasattr(item, "callspec") else None
    )
    return dtype is not None and dtype != torch.bfloat16


class DeviceCheck:
    """Ends the process, after a failed test's last report, if the device cannot be used any more."""

    def __init__(self, *, is_worker: bool) -> None:
        self._is_worker = is_worker
        self._has_failed = False

    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._has_failed |= report.failed
        if report.when != "teardown" or not self._has_failed:
            return
        self._has_failed = False
        import torch  # here, because a process that only distributes tests does not need it

        try:
            if torch.cuda.is_initialized():
                torch.cuda.synchronize()
        except Exception as error:  # torch.AcceleratorError, or the driver's own
            print(f"\nERROR: {report.nodeid} left a device that cannot be used: {error}", flush=True)
            if self._is_worker:
                os._exit(_BROKEN_DEVICE)  # pytest-xdist starts another process for the tests behind this one
            pytest.exit("the device cannot be used", returncode=_BROKEN_DEVICE)


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(DeviceCheck(is_worker=hasattr(config, "workerinput")))


@pytest.fixture(autouse=True)
def plain_engines(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a compile pool, whose processes would outnumber the cores where tests run in several processes."""
    from proa_engine import executor
    from proa_engine.executor import uniproc
    from proa_engine.kernels.products import linear

    # References on the CPU need not have the same bits in every batch: to find out how takes longer than to compute.
    monkeypatch.setattr(linear, "find_row_policy", lambda *_: linear.Verdict(linear.RowPolicy()))
    if request.node.get_closest_marker("compile_pool") is None:
        monkeypatch.setattr(executor, "begin_compile_pool", lambda config: None)
        monkeypatch.setattr(uniproc, "start_compile_pool", lambda config, rank, begun: None)
    if request.config.getoption("--enforce-eager"):
        monkeypatch.setattr(uniproc, "Worker", eager_worker)


def eager_worker(config: "EngineConfig", rank: int, log: Callable[[str], None], **more: Any) -> "Worker":
    from proa_engine.worker.worker import Worker

    return Worker(replace(config, enforce_eager=True), rank, log, **more)
