"""API keys: the format of the file, the caller of a header, and reloading a changed file."""

import asyncio
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from proa_gateway import keep_running
from proa_gateway.admission import auth
from proa_gateway.admission.auth import ApiKey, ApiKeyStore, read_keys
from proa_gateway.errors import InvalidApiKey

A = {"name": "team-a", "key": "sk-aaaa", "requests_per_minute": 10}
B = {"name": "team-b", "sha256": hashlib.sha256(b"sk-bbbb").hexdigest(), "priority": -1, "weight": 2}


def write(path: Path, *keys: Any) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    return path


def test_keys_without_a_file_have_no_name_and_no_limits(tmp_path: Path) -> None:
    store = ApiKeyStore(None, ["sk-1", "sk-2"])
    assert [store.authenticate(f"Bearer {key}").name for key in ("sk-1", "sk-2")] == ["", ""]
    for header in (None, "Bearer sk-3"):
        with pytest.raises(InvalidApiKey):
            store.authenticate(header)
    both = ApiKeyStore(write(tmp_path / "keys.json", A), ["sk-1"])
    assert [both.authenticate(f"Bearer {key}").name for key in ("sk-1", "sk-aaaa")] == ["", "team-a"]


def test_the_file_has_keys_as_text_or_as_digests(tmp_path: Path) -> None:
    store = ApiKeyStore(write(tmp_path / "keys.json", A, B))
    assert store.authenticate("Bearer sk-aaaa").name == "team-a"
    b = store.authenticate("bearer  sk-bbbb ")
    assert (b.name, b.priority, b.weight) == ("team-b", -1, 2)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer sk-aaa", "Bearer sk-aaaaa", "Basic sk-aaaa", "sk-aaaa", "Bearer é"],
)
def test_other_headers_are_rejected(tmp_path: Path, header: str | None) -> None:
    store = ApiKeyStore(write(tmp_path / "keys.json", A))
    with pytest.raises(InvalidApiKey) as refused:
        store.authenticate(header)
    assert refused.value.headers == {"www-authenticate": "Bearer"}


def test_a_digest_is_not_a_key(tmp_path: Path) -> None:
    store = ApiKeyStore(write(tmp_path / "keys.json", B))
    with pytest.raises(InvalidApiKey):
        store.authenticate(f"Bearer {B['sha256']}")


def test_a_key_whose_digest_has_only_the_indexed_bytes_of_a_known_one_is_rejected(tmp_path: Path) -> None:
    alike = hashlib.sha256(b"sk-cccc").hexdigest()[:32] + "0" * 32
    store = ApiKeyStore(write(tmp_path / "keys.json", {"name": "team-c", "sha256": alike}))
    with pytest.raises(InvalidApiKey):
        store.authenticate("Bearer sk-cccc")


def test_without_a_file_all_requests_have_the_same_nameless_caller() -> None:
    store = ApiKeyStore(None)
    assert store.authenticate(None) is store.authenticate("Bearer anything")
    assert store.authenticate(None).name == ""


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "JSON"),
        ("[]", "object"),
        ('{"keys": []}', "at least 1"),
        ('{"keys": [{"name": "a"}]}', "either key or sha256"),
        ('{"keys": [{"name": "a", "key": "sk-secret", "sha256": "' + "0" * 64 + '"}]}', "either key or sha256"),
        ('{"keys": [{"name": "a b", "key": "sk-secret"}]}', "keys.0.name"),
        ('{"keys": [{"name": "a", "key": "sk secret"}]}', "keys.0.key"),
        ('{"keys": [{"name": "a", "key": "sk-secret", "weight": 0}]}', "keys.0.weight"),
        ('{"keys": [{"name": "a", "key": "sk-secret", "weight": NaN}]}', "keys.0.weight"),
        ('{"keys": [{"name": "a", "key": "sk-secret", "requests_per_minute": "9"}]}', "keys.0.requests_per_minute"),
        ('{"keys": [{"name": "a", "key": "sk-secret", "rpm": 9}]}', "keys.0.rpm"),
        ('{"keys": [{"name": "a", "key": "sk-secret"}, {"name": "a", "key": "sk-other"}]}', "'a'"),
        ('{"keys": [{"name": "a", "key": "sk-secret"}, {"name": "b", "key": "sk-secret"}]}', "twice"),
    ],
)
def test_the_error_of_an_invalid_file_shows_no_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.json") as refused:
        read_keys(path)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        ApiKeyStore(tmp_path / "nothing")


async def test_a_rotated_secret_is_loaded_and_an_invalid_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The kubelet writes a new folder and replaces a symbolic link to it."""
    monkeypatch.setattr(auth, "POLL_INTERVAL", 0.01)

    def mount(version: str, *keys: Any) -> None:
        (tmp_path / version).mkdir()
        write(tmp_path / version / "keys.json", *keys)
        os.symlink(version, tmp_path / "..data_tmp")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

    mount("1", A)
    os.symlink("..data/keys.json", tmp_path / "keys.json")
    store = ApiKeyStore(tmp_path / "keys.json")
    caller = store.authenticate("Bearer sk-aaaa")
    with caller.limiter.acquire():
        pass
    following = asyncio.create_task(store.watch())
    try:
        mount("2", A | {"key": "sk-new", "requests_per_minute": 20}, B)
        await _until(lambda: _known(store, "sk-new"))
        assert not _known(store, "sk-aaaa")
        assert store.authenticate("Bearer sk-new") is caller
        assert caller.limiter.headers()["x-ratelimit-remaining-requests"] == "19"
        with caplog.at_level(logging.ERROR):
            mount("3", {"name": "team-a", "key": "sk-newest", "weight": -1})
            await _until(lambda: "keys.0.weight" in caplog.text)
        assert _known(store, "sk-new")
        mount("4", B)
        await _until(lambda: not _known(store, "sk-new"))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_keys_that_could_not_be_read_are_read_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auth, "POLL_INTERVAL", 0.01)
    monkeypatch.setattr(keep_running, "FIRST_PAUSE", 0.01)
    path = tmp_path / "keys.json"
    write(path, A)
    store = ApiKeyStore(path)
    num_failures = 0

    def fail(path: Path) -> list[ApiKey]:
        nonlocal num_failures
        num_failures += 1
        raise KeyError("name")

    following = asyncio.create_task(keep_running.keep_running("watching the keys", store.watch))
    try:
        with monkeypatch.context() as broken:
            broken.setattr(auth, "read_keys", fail)
            write(path, A, B)
            await _until(lambda: num_failures >= 2)
        await _until(lambda: _known(store, "sk-bbbb"))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _known(store: ApiKeyStore, key: str) -> bool:
    try:
        store.authenticate(f"Bearer {key}")
    except InvalidApiKey:
        return False
    return True


async def _until(predicate: Any) -> None:
    async with asyncio.timeout(10):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


def test_keys_without_names_are_callers_of_their_own() -> None:
    store = ApiKeyStore(None, ["sk-1", "sk-2"], ["sk-3"])
    callers = [store.authenticate(f"Bearer sk-{number}") for number in (1, 2, 3)]
    assert len({caller.owner for caller in callers}) == 3
    assert not any("sk-" in caller.owner for caller in callers)
    assert [caller.role for caller in callers] == ["user", "user", "operator"]
    assert [caller.name for caller in callers] == [""] * 3


def test_where_no_key_is_needed_every_caller_is_an_operator() -> None:
    assert ApiKeyStore(None).authenticate(None).role == "operator"


def test_separate_prefix_caches_have_a_salt_for_each_key_and_salt() -> None:
    for separates, num_salts in ((False, 2), (True, 4)):
        store = ApiKeyStore(None, ["sk-1", "sk-2"], separates_caches=separates)
        callers = [store.authenticate(f"Bearer sk-{number}") for number in (1, 2)]
        salts = {caller.cache_salt(salt) for caller in callers for salt in (None, "", "x")}
        assert len(salts) == num_salts
        assert ("" in salts) is not separates
    open_gateway = ApiKeyStore(None, separates_caches=True)
    assert open_gateway.authenticate(None).cache_salt("x") == "x"
