"""Forms with a file, as clients send them and as they should not."""

from collections.abc import Sequence
from typing import Any

import pytest
from fastapi import Request

from proa_gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType
from proa_gateway.http import forms
from proa_gateway.http.forms import PIECE_BYTES, Form, read_form

BOUNDARY = "b"
FILE = bytes(range(256)) * 20 + b"\r\n--\r\n--c\r\n"  # has what looks like the beginning of a boundary


def part(name: str, content: bytes, *headers: str) -> bytes:
    head = "\r\n".join([f'Content-Disposition: form-data; name="{name}"', *headers])
    return f"--{BOUNDARY}\r\n{head}\r\n\r\n".encode() + content + b"\r\n"


def body(*parts: bytes) -> bytes:
    return b"".join(parts) + f"--{BOUNDARY}--\r\n".encode()


async def read(
    data: bytes,
    *,
    size: int = 1000,
    content_type: str = f"multipart/form-data; boundary={BOUNDARY}",
    max_file_bytes: int = 10_000,
) -> Form:
    """`size`: of the parts in which the body arrives."""
    messages = [data[start : start + size] for start in range(0, len(data), size)]

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": messages.pop(0), "more_body": bool(messages)}

    scope = {"type": "http", "headers": [(b"content-type", content_type.encode())]}
    return await read_form(Request(scope, receive), file_field="file", max_file_bytes=max_file_bytes)


@pytest.mark.parametrize("size", [1, 7, 100_000])
async def test_a_form_has_its_file_and_fields_whatever_parts_it_arrives_in(size: int) -> None:
    parts = (part("model", b"m"), part("file", FILE, "Content-Type: audio/wav"), part("prompt", "né".encode()))
    form = await read(body(*parts), size=size)
    assert b"".join(form.file) == FILE
    assert form.fields == {"model": ["m"], "prompt": ["né"]}


@pytest.mark.parametrize("content", [b"\r", b"\n", b"\r\n", b"\r\n-", b"\r\n--"])
async def test_files_like_boundaries_are_kept_in_few_pieces(content: bytes) -> None:
    data = content * 100_000
    form = await read(body(part("file", data + b"x")), size=65_536, max_file_bytes=10_000_000)
    assert b"".join(form.file) == data + b"x"
    assert len(form.file) <= 1 + len(data) // PIECE_BYTES


async def test_names_of_lists_have_brackets_or_none() -> None:
    form = await read(body(part("include[]", b"a"), part("include", b"b")))
    assert form.fields == {"include": ["a", "b"]}
    assert not form.file


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello", "The form cannot be read"),
        (body(part("file", FILE))[:-8], "its end is missing"),
        (part("file", FILE), "its end is missing"),
        (body(part("prompt", b"\xff")), "prompt is not UTF-8"),
        (body(*[part("a", b"")] * 3), "The form has more than 2 fields"),
        (body(*[part("file", FILE)] * 2), "The form has several parts file"),
        (body(b"--b\r\n" + b"x" * 10_000 + b": y\r\n\r\n\r\n"), "The form cannot be read"),
    ],
)
async def test_broken_forms_are_refused(data: bytes, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "MAX_FIELDS", 2)
    with pytest.raises(InvalidRequest, match=message):
        await read(data)


@pytest.mark.parametrize("content_type", ["application/json", "multipart/form-data", "", "text/plain; boundary=b"])
async def test_other_bodies_are_refused_by_their_type(content_type: str) -> None:
    with pytest.raises(UnsupportedMediaType, match="multipart/form-data"):
        await read(b"{}", content_type=content_type)


@pytest.mark.parametrize(
    ("parts", "param"), [([part("file", bytes(101))], "file"), ([part("a", bytes(101)), part("file", b"1")], None)]
)
async def test_files_and_fields_over_their_limits_are_refused(
    parts: Sequence[bytes], param: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forms, "FIELD_BYTES", 100)
    with pytest.raises(BodyTooLarge) as caught:
        await read(body(*parts), max_file_bytes=100)
    assert caught.value.param == param
