"""The store of responses: what it keeps, and for whom."""

import pytest

from proa_gateway.apis.responses.items import parsed
from proa_gateway.apis.responses.store import MAX_PARTS, OwnersResponses
from proa_gateway.serving.stored_responses import ResponseStore, StoredResponse


def stored(size: int = 10) -> StoredResponse:
    return StoredResponse(b"r" * (size - 2), b"[]")


def new_store(*, max_responses: int = 100, max_bytes: int = 1000, max_response_bytes: int = 1000) -> ResponseStore:
    return ResponseStore(max_responses=max_responses, max_bytes=max_bytes, max_response_bytes=max_response_bytes)


def kept(store: ResponseStore, *ids: str, owner: str = "") -> list[str]:
    return [id for id in ids if store.get(owner, id) is not None]


def test_the_least_recently_used_response_goes_first() -> None:
    store = new_store(max_responses=2)
    store.put("", "a", stored())
    store.put("", "b", stored())
    assert store.get("", "a")
    store.put("", "c", stored())
    assert kept(store, "a", "b", "c") == ["a", "c"]


def test_the_size_is_bounded_too() -> None:
    store = new_store(max_bytes=30)
    for id in "abcd":
        store.put("", id, stored(10))
    assert kept(store, *"abcd") == ["b", "c", "d"]
    store.put("", "b", stored(20))  # replaces the smaller one
    assert kept(store, *"abcd") == ["b", "d"]


def test_a_response_that_is_too_large_is_not_kept_and_takes_no_others_place() -> None:
    for store in (new_store(max_bytes=30), new_store(max_response_bytes=30)):
        store.put("", "a", stored(30))
        store.put("", "b", stored(31))
        assert kept(store, *"ab") == ["a"]
        store.put("", "a", stored(31))  # the older state would be wrong
        assert kept(store, "a") == []


def test_what_is_deleted_makes_room() -> None:
    store = new_store(max_bytes=20)
    store.put("", "a", stored(10))
    store.put("", "b", stored(10))
    store.delete("", "b")
    store.delete("", "b")
    store.put("", "c", stored(10))
    assert kept(store, *"abc") == ["a", "c"]


def test_owners_do_not_see_each_others_responses() -> None:
    store = new_store(max_responses=2)
    store.put("one", "a", stored())
    store.delete("two", "a")
    assert store.get("two", "a") is None
    assert store.get("one", "a") == stored()


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = new_store(max_responses=0)
    store.put("", "a", stored())
    assert kept(store, "a") == []


def test_each_owner_can_keep_its_share_whatever_others_store() -> None:
    store = new_store(max_responses=6, max_bytes=1000)
    for id in "abc":
        store.put("one", id, stored())
    for number in range(100):
        store.put("two", str(number), stored())
    assert kept(store, *"abc", owner="one") == ["a", "b", "c"]
    assert kept(store, "96", "97", "98", "99", owner="two") == ["97", "98", "99"]

    store = new_store(max_bytes=100)
    store.put("one", "a", stored(50))
    for size in (10, 60, 70, 90):
        store.put("two", str(size), stored(size))
        assert kept(store, "a", owner="one") == ["a"]


def test_an_owner_may_have_what_others_leave() -> None:
    store = new_store(max_responses=4)
    store.put("one", "a", stored())
    for id in "abcd":
        store.put("two", id, stored())
    assert kept(store, *"abcd", owner="two") == ["b", "c", "d"]
    store.delete("one", "a")
    store.put("two", "e", stored())
    assert kept(store, *"abcde", owner="two") == ["b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("parts", "is_kept"),
    [
        ([{"type": "input_text", "text": "a" * 700}], True),
        ([{"type": "input_text", "text": "a" * 1100}], False),
        ([{"type": "input_text", "text": '"type":"' * 50}], True),
        ([{"type": "input_text", "text": ""}] * MAX_PARTS, False),
    ],
)
def test_an_input_is_kept_up_to_a_size_and_a_number_of_parts(parts: list[dict[str, str]], is_kept: bool) -> None:
    # So that the input of parts is small, but for their number.
    store = new_store(max_bytes=2**20, max_response_bytes=1000 if len(parts) == 1 else 2**20)
    keep = OwnersResponses(store, "").keep(parsed([{"type": "message", "role": "user", "content": parts}]))
    assert (keep is not None) is is_kept
