"""Every error has one code, and what another engine may take says so."""

from typing import get_args

import grpc
import pytest

from proa_engine.core.types import RejectionCode
from proa_engine.server import errors


def test_every_error_is_in_the_table() -> None:
    assert set(errors.STATUS_CODES) == set(errors.EngineError.__subclasses__())


def test_every_rejection_of_the_core_is_an_error() -> None:
    assert set(errors.REJECTIONS) == set(get_args(RejectionCode))


@pytest.mark.parametrize("kind", errors.EngineError.__subclasses__())
def test_unavailable_engines_and_full_queues_can_be_retried_elsewhere(kind: type[errors.EngineError]) -> None:
    unavailable = errors.STATUS_CODES[kind] is grpc.StatusCode.UNAVAILABLE

    assert kind("…").retryable == (unavailable or kind is errors.QueueFull)


def test_numbers_are_those_of_grpc() -> None:
    assert errors.status_number(errors.InvalidRequest("…")) == 3
    assert errors.status_number(errors.QueueFull("…")) == 8
    assert errors.status_number(errors.Draining("…")) == 14
