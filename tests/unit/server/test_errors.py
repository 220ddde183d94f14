"""Each error has a status code and says whether another engine may accept the request."""

from typing import get_args

import grpc
import pytest

from proa_engine.core.lora_store import LoraError
from proa_engine.core.types import RejectionCode
from proa_engine.server import errors


def test_every_error_is_in_the_table() -> None:
    assert set(errors.STATUS_CODES) == {*errors.EngineError.__subclasses__(), *LoraError.__subclasses__()}


def test_every_rejection_of_the_core_is_an_error() -> None:
    assert set(errors.REJECTIONS) == set(get_args(RejectionCode))


@pytest.mark.parametrize("kind", errors.EngineError.__subclasses__())
def test_errors_that_another_engine_may_not_have_are_retryable(kind: type[errors.EngineError]) -> None:
    unavailable = errors.STATUS_CODES[kind] is grpc.StatusCode.UNAVAILABLE

    assert kind("…").retryable == (unavailable or kind in (errors.QueueFull, errors.LoraNotLoaded, errors.MediaMissing))


def test_numbers_are_those_of_grpc() -> None:
    assert errors.status_number(errors.InvalidRequest("…")) == 3
    assert errors.status_number(errors.QueueFull("…")) == 8
    assert errors.status_number(errors.Draining("…")) == 14
