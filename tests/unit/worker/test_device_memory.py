"""GPU memory: what is available for the KV cache, and the estimate of what CUDA graphs take."""

import pytest
import torch

from proa_engine.config import EngineConfig
from proa_engine.worker.device_memory import MeasuringCapture, MemoryUsage
from proa_engine.worker.worker import Worker
from support.runner import FakeCapture

GIB = 2**30


def test_the_kv_cache_gets_the_memory_that_nothing_else_takes() -> None:
    usage = MemoryUsage(
        140 * GIB,
        weights=15 * GIB,
        largest_step=2 * GIB,
        graphs=GIB,
        encoded_images=GIB,
        other=3 * GIB,
        reserve=13 * GIB,
    )
    assert usage.available == 105 * GIB
    assert str(usage) == (
        "GPU memory 140.00 GiB: weights 15.00, largest step 2.00, CUDA graphs 1.00, encoded images 1.00, "
        "libraries and other processes 3.00, reserve 13.00, available for the KV cache 105.00"
    )


def test_smaller_graphs_share_the_memory_of_the_largest() -> None:
    free = iter([1000, 600, 590])
    capture = MeasuringCapture(FakeCapture(), lambda: next(free))
    for _ in range(2):
        capture.capture(lambda: torch.zeros(1))
    assert capture.estimate(num_graphs=5) == 400 + 4 * 10


def test_the_largest_graph_of_each_kind_is_counted_once() -> None:
    free = iter([1000, 600, 590, 500, 495])
    capture = MeasuringCapture(FakeCapture(), lambda: next(free))
    for _ in range(4):
        capture.capture(lambda: torch.zeros(1))
    assert capture.estimate(num_graphs=10) == 400 + 10 + 90 + 5 + 6 * 5


def test_one_graph_is_counted_once() -> None:
    free = iter([1000, 600])
    capture = MeasuringCapture(FakeCapture(), lambda: next(free))
    capture.capture(lambda: torch.zeros(1))
    assert capture.estimate(num_graphs=1) == 400


@pytest.mark.parametrize(
    ("raised", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), (ValueError, r"0.50 GiB of 80.00 are left.*quantization")),
        (RuntimeError("a kernel failed"), (RuntimeError, "a kernel failed")),
    ],
)
def test_out_of_memory_names_what_to_change_and_other_errors_are_unchanged(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, expected: tuple[type[Exception], str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("proa_engine.worker.weights.load_model", load)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (GIB // 2, 80 * GIB))
    worker = Worker(EngineConfig(model="builtin", device="cpu"), 0, lambda text: None)
    worker.init_device()
    with pytest.raises(expected[0], match=expected[1]):
        worker.load_model()
