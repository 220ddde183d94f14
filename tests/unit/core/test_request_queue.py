"""RequestQueue: order, with requests removed in between."""

import random

import pytest

from proa_engine.core.admission.request_queue import RequestQueue
from proa_engine.core.request import Request
from support.core import make_request


def waiting(order: tuple[int, int], length: int = 1) -> Request:
    request = make_request(str(order), range(length))
    return Request(request, order=order, max_num_tokens=100, eos_token_ids=frozenset())


def test_lower_order_comes_first() -> None:
    queue = RequestQueue()
    for order in [(0, 2), (1, 0), (-1, 3), (0, 1)]:
        queue.push(waiting(order))
    assert [queue.pop().order for _ in range(4)] == [(-1, 3), (0, 1), (0, 2), (1, 0)]
    assert queue.peek() is None


def test_removed_requests_are_skipped() -> None:
    queue = RequestQueue()
    requests = [waiting((0, index), length=index + 1) for index in range(3)]
    for request in requests:
        queue.push(request)
    queue.remove(requests[0])
    assert queue.peek() is requests[1]
    assert (len(queue), queue.num_tokens) == (2, 5)
    assert queue.to_list() == requests[1:]


def test_popped_requests_may_be_pushed_again() -> None:
    queue = RequestQueue()
    request = waiting((0, 0), length=4)
    queue.push(request)
    assert queue.pop() is request
    queue.push(request)
    assert (len(queue), queue.num_tokens) == (1, 4)
    assert queue.pop() is request


def test_popping_from_an_empty_queue_fails() -> None:
    with pytest.raises(AssertionError, match="the queue is empty"):
        RequestQueue().pop()


def test_dead_entries_do_not_pile_up_behind_the_head() -> None:
    queue = RequestQueue()
    queue.push(waiting((0, 0)))
    for index in range(1, 5000):
        request = waiting((0, index))
        queue.push(request)
        queue.remove(request)
    assert len(queue._entries) < 100
    assert (len(queue), queue.num_tokens) == (1, 1)


def test_agrees_with_a_sorted_list_under_random_use() -> None:
    rng = random.Random(0)
    queue, model = RequestQueue(), list[Request]()
    for index in range(3000):
        action = rng.random()
        if action < 0.5:
            request = waiting((rng.randint(-2, 2), index))
            queue.push(request)
            model.append(request)
            model.sort(key=lambda request: request.order)
        elif model and action < 0.75:
            assert queue.pop() is model.pop(0)
        elif model:
            queue.remove(model.pop(rng.randrange(len(model))))
        assert queue.peek() is (model[0] if model else None)
        assert len(queue) == len(model)
    assert queue.to_list() == model
