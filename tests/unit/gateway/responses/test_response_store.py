"""The store of responses: what it keeps, and for whom."""

from proa_gateway.response_store import ResponseStore, StoredResponse


def stored(size: int = 10) -> StoredResponse:
    return StoredResponse(b"r" * (size - 2), b"[]")


def kept(store: ResponseStore, *ids: str) -> list[str]:
    return [id for id in ids if store.get("", id) is not None]


def test_the_least_recently_used_response_goes_first() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1000)
    store.put("", "a", stored())
    store.put("", "b", stored())
    assert store.get("", "a")
    store.put("", "c", stored())
    assert kept(store, "a", "b", "c") == ["a", "c"]


def test_the_size_is_bounded_too() -> None:
    store = ResponseStore(max_responses=100, max_bytes=30)
    for id in "abcd":
        store.put("", id, stored(10))
    assert kept(store, *"abcd") == ["b", "c", "d"]
    store.put("", "b", stored(20))  # replaces the smaller one
    assert kept(store, *"abcd") == ["b", "d"]
    store.put("", "e", stored(31))
    assert kept(store, *"abcde") == []


def test_what_is_deleted_makes_room() -> None:
    store = ResponseStore(max_responses=100, max_bytes=20)
    store.put("", "a", stored(10))
    store.put("", "b", stored(10))
    store.delete("", "b")
    store.delete("", "b")
    store.put("", "c", stored(10))
    assert kept(store, *"abc") == ["a", "c"]


def test_callers_do_not_see_each_others_responses() -> None:
    store = ResponseStore(max_responses=2, max_bytes=1000)
    store.put("one", "a", stored())
    store.delete("two", "a")
    assert store.get("two", "a") is None
    assert store.get("one", "a") == stored()


def test_a_store_of_no_size_keeps_nothing() -> None:
    store = ResponseStore(max_responses=0, max_bytes=1000)
    store.put("", "a", stored())
    assert kept(store, "a") == []
