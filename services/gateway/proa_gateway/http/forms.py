"""Forms with one file: `multipart/form-data` into memory.

Not by Starlette's `Request.form`, which writes files to the disk: gateways' pods have a read-only one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from fastapi import Request
from python_multipart import MultipartParser
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import parse_options_header

from proa_gateway.errors import BodyTooLarge, InvalidRequest, UnsupportedMediaType

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

PIECE_BYTES: Final = 64 * 1024
"""Content is kept in pieces of about this size, however small the parts are in which it arrives."""
FIELD_BYTES: Final = 1024 * 1024  # of all that is no file, in one form
MAX_FIELDS: Final = 1000


@dataclass(frozen=True, slots=True)
class Form:
    """`fields`: the texts of each, by name. `file`: its content, in parts; empty: there is none. Whoever passes the
    content on takes the parts out."""

    fields: Mapping[str, list[str]]
    file: list[bytearray]


async def read_form(request: Request, *, file_field: str, max_file_bytes: int) -> Form:
    """Read the form in a request's body. `file_field`: the name of its file, whatever its type and file name say.
    Raises `UnsupportedMediaType`, `InvalidRequest` and `BodyTooLarge`."""
    content_type, options = parse_options_header(request.headers.get("content-type"))
    boundary = options.get(b"boundary")
    if content_type != b"multipart/form-data" or not boundary:
        sent = request.headers.get("content-type", "")[:80]
        message = f"The body must be a form, sent with the header Content-Type: multipart/form-data, not {sent!r}."
        raise UnsupportedMediaType(message)
    reader = _Reader(file_field, max_file_bytes)
    try:
        parser = MultipartParser(boundary, reader.callbacks())
        async for data in request.stream():
            parser.write(data)
        parser.finalize()
    except FormParserError as error:
        raise InvalidRequest(f"The form cannot be read: {error}.") from error
    if not reader.is_complete:
        raise InvalidRequest("The form cannot be read: its end is missing.")
    return reader.form()


class _Reader:
    """Takes the parts that the parser finds."""

    def __init__(self, file_field: str, max_file_bytes: int) -> None:
        self._file_field = file_field
        self._max_file_bytes = max_file_bytes
        self._file: list[bytearray] = []
        self._has_file = False
        self._fields: list[tuple[str, list[bytearray]]] = []
        self._header = [b"", b""]  # name and value of the part's header that is being read
        self._name = ""  # of the part
        self._part: list[bytearray] = []  # where its content goes
        self._num_file_bytes = self._num_other_bytes = 0
        self.is_complete = False

    def callbacks(self) -> "MultipartCallbacks":
        return {
            "on_part_begin": self._begin,
            "on_header_field": partial(self._add_header, 0),
            "on_header_value": partial(self._add_header, 1),
            "on_header_end": self._end_header,
            "on_headers_finished": self._open,
            "on_part_data": self._add,
            "on_end": self._end,
        }

    def form(self) -> Form:
        fields: dict[str, list[str]] = {}
        try:
            for name, parts in self._fields:
                fields.setdefault(name, []).append(b"".join(parts).decode())
        except UnicodeDecodeError:
            raise InvalidRequest(f"{name} is not UTF-8.", param=name) from None
        return Form(fields, self._file)

    def _begin(self) -> None:
        self._name, self._header = "", [b"", b""]

    def _add_header(self, index: int, data: bytes, start: int, end: int) -> None:
        self._header[index] += data[start:end]

    def _end_header(self) -> None:
        (name, value), self._header = self._header, [b"", b""]
        if name.lower() == b"content-disposition":
            self._name = parse_options_header(value)[1].get(b"name", b"").decode(errors="replace").removesuffix("[]")

    def _open(self) -> None:
        """The part's content follows."""
        if self._name == self._file_field:
            if self._has_file:
                raise InvalidRequest(f"The form has several parts {self._file_field}.", param=self._file_field)
            self._part, self._has_file = self._file, True
            return
        if len(self._fields) == MAX_FIELDS:
            raise InvalidRequest(f"The form has more than {MAX_FIELDS} fields.")
        self._part = []
        self._fields.append((self._name, self._part))

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._part is self._file:
            self._num_file_bytes += end - start
        else:
            self._num_other_bytes += end - start
        if self._num_file_bytes > self._max_file_bytes:
            limit = self._max_file_bytes
            raise BodyTooLarge(f"{self._file_field} must not be larger than {limit} bytes.", param=self._file_field)
        if self._num_other_bytes > FIELD_BYTES:
            raise BodyTooLarge(f"The fields beside the file must not be larger than {FIELD_BYTES} bytes.")
        if self._part and len(self._part[-1]) < PIECE_BYTES:
            self._part[-1] += data[start:end]
        else:
            self._part.append(bytearray(data[start:end]))

    def _end(self) -> None:
        self.is_complete = True
