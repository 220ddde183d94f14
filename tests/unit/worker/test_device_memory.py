"""The account of a GPU's memory: what is left for the KV cache, and what recordings are expected to take."""

import pytest
import torch

from proa_engine.config import EngineConfig
from proa_engine.worker.device_memory import MeasuringRecorder, MemoryAccount
from proa_engine.worker.worker import Worker
from support.runner import CallingRecorder

GIB = 2**30


def test_the_cache_gets_what_all_others_leave_and_the_account_says_where_the_rest_goes() -> None:
    account = MemoryAccount(140 * GIB, weights=15 * GIB, step=2 * GIB, graphs=GIB, other=3 * GIB, untouched=14 * GIB)
    assert account.left == 105 * GIB
    assert str(account) == (
        "GPU memory 140.00 GiB: weights 15.00, the largest step 2.00, CUDA graphs 1.00, libraries and others 3.00, "
        "left alone 14.00, for the KV cache 105.00"
    )


def test_the_largest_recording_brings_the_memory_that_smaller_ones_share() -> None:
    free = iter([1000, 600, 590])
    recorder = MeasuringRecorder(CallingRecorder(), lambda: next(free))
    for _ in range(2):
        recorder.record(lambda: torch.zeros(1))
    assert recorder.estimate(num_graphs=5) == 400 + 4 * 10


def test_one_recording_is_counted_alone() -> None:
    free = iter([1000, 600])
    recorder = MeasuringRecorder(CallingRecorder(), lambda: next(free))
    recorder.record(lambda: torch.zeros(1))
    assert recorder.estimate(num_graphs=1) == 400


@pytest.mark.parametrize(
    ("raised", "told"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), (ValueError, r"0.50 GiB of 80.00 are left.*quantization")),
        (RuntimeError("a kernel failed"), (RuntimeError, "a kernel failed")),
    ],
)
def test_a_gpu_without_room_for_the_model_is_told_in_a_sentence_and_other_errors_as_they_are(
    monkeypatch: pytest.MonkeyPatch, raised: Exception, told: tuple[type[Exception], str]
) -> None:
    def load(*_: object, **__: object) -> None:
        raise raised

    monkeypatch.setattr("proa_engine.worker.worker.load_model", load)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (GIB // 2, 80 * GIB))
    worker = Worker(EngineConfig(model="builtin", device="cpu"), 0, lambda text: None)
    worker.init_device()
    with pytest.raises(told[0], match=told[1]):
        worker.load_model()
