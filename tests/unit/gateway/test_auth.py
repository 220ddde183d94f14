"""API keys: what a file must be, who a header stands for, and that a changed file takes effect."""

import asyncio
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from proa_gateway.admission import auth
from proa_gateway.admission.auth import ApiKeyStore, read_keys
from proa_gateway.errors import InvalidApiKey

A = {"name": "team-a", "key": "sk-aaaa", "requests_per_minute": 10}
B = {"name": "team-b", "sha256": hashlib.sha256(b"sk-bbbb").hexdigest(), "priority": -1, "weight": 2}


def write(path: Path, *keys: Any) -> Path:
    path.write_text(json.dumps({"keys": keys}))
    return path


def test_keys_stand_in_the_file_as_they_are_or_by_their_digest(tmp_path: Path) -> None:
    ring = ApiKeyStore(write(tmp_path / "keys.json", A, B))
    assert ring.authenticate("Bearer sk-aaaa").name == "team-a"
    b = ring.authenticate("bearer  sk-bbbb ")
    assert (b.name, b.priority, b.weight) == ("team-b", -1, 2)


@pytest.mark.parametrize(
    "header",
    [None, "", "Bearer", "Bearer ", "Bearer sk-aaa", "Bearer sk-aaaaa", "Basic sk-aaaa", "sk-aaaa", "Bearer é"],
)
def test_other_headers_are_refused(tmp_path: Path, header: str | None) -> None:
    ring = ApiKeyStore(write(tmp_path / "keys.json", A))
    with pytest.raises(InvalidApiKey) as refused:
        ring.authenticate(header)
    assert refused.value.headers == {"www-authenticate": "Bearer"}


def test_a_digest_is_no_key(tmp_path: Path) -> None:
    ring = ApiKeyStore(write(tmp_path / "keys.json", B))
    with pytest.raises(InvalidApiKey):
        ring.authenticate(f"Bearer {B['sha256']}")


def test_a_key_whose_digest_only_begins_like_a_known_one_is_refused(tmp_path: Path) -> None:
    alike = hashlib.sha256(b"sk-cccc").hexdigest()[:32] + "0" * 32
    ring = ApiKeyStore(write(tmp_path / "keys.json", {"name": "team-c", "sha256": alike}))
    with pytest.raises(InvalidApiKey):
        ring.authenticate("Bearer sk-cccc")


def test_without_a_file_everybody_is_the_same_nameless_caller() -> None:
    ring = ApiKeyStore(None)
    assert ring.authenticate(None) is ring.authenticate("Bearer anything")
    assert ring.authenticate(None).name == ""


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
def test_a_bad_file_is_refused_with_a_sentence_that_shows_no_key(tmp_path: Path, text: str, says: str) -> None:
    path = tmp_path / "keys.json"
    path.write_text(text)
    with pytest.raises(ValueError, match=r"keys\.json") as refused:
        read_keys(path)
    assert says in str(refused.value)
    assert "secret" not in str(refused.value)


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="No such file"):
        ApiKeyStore(tmp_path / "nothing")


async def test_a_rotated_secret_takes_effect_and_a_bad_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As the kubelet does it: files in a folder of their own, and a symbolic link that is replaced."""
    monkeypatch.setattr(auth, "POLL_INTERVAL", 0.01)

    def mount(version: str, *keys: Any) -> None:
        (tmp_path / version).mkdir()
        write(tmp_path / version / "keys.json", *keys)
        os.symlink(version, tmp_path / "..data_tmp")
        os.replace(tmp_path / "..data_tmp", tmp_path / "..data")

    mount("1", A)
    os.symlink("..data/keys.json", tmp_path / "keys.json")
    ring = ApiKeyStore(tmp_path / "keys.json")
    caller = ring.authenticate("Bearer sk-aaaa")
    with caller.limiter.acquire():
        pass
    following = asyncio.create_task(ring.watch())
    try:
        mount("2", A | {"key": "sk-new", "requests_per_minute": 20}, B)
        await _until(lambda: _known(ring, "sk-new"))
        assert not _known(ring, "sk-aaaa")
        assert ring.authenticate("Bearer sk-new") is caller
        assert caller.limiter.headers()["x-ratelimit-remaining-requests"] == "19"
        with caplog.at_level(logging.ERROR):
            mount("3", {"name": "team-a", "key": "sk-newest", "weight": -1})
            await _until(lambda: "keys.0.weight" in caplog.text)
        assert _known(ring, "sk-new")
        mount("4", B)
        await _until(lambda: not _known(ring, "sk-new"))
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


def _known(ring: ApiKeyStore, key: str) -> bool:
    try:
        ring.authenticate(f"Bearer {key}")
    except InvalidApiKey:
        return False
    return True


async def _until(predicate: Any) -> None:
    async with asyncio.timeout(10):
        while not predicate():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
