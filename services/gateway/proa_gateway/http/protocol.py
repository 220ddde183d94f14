"""uvicorn's HTTP protocol as the `Connection` of its responses, with limits that apply before a request is parsed."""

import asyncio
import logging
import secrets
from typing import Any, Final

import httptools
import orjson
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from proa.addresses import host_and_port
from proa_gateway.errors import GatewayError, HeadersTooLarge, MalformedHttp, RequestTimeout
from proa_gateway.http.errors import ErrorForms
from proa_gateway.http.streaming import CONNECTION, ResponseWriter

MAX_HEAD_BYTES: Final = 64 * 1024  # of a request's line and headers
MAX_HEADERS: Final = 100
SEND_SECONDS: Final = 60.0  # for which a client may leave the transport's buffer unread
HEAD_SECONDS: Final = 30.0  # from a connection's or a request's first byte to the end of its headers
_log = logging.getLogger(__name__)
_UPGRADE: Final = (b"upgrade", b"http2-settings")


class HttpProtocol(HttpToolsProtocol):
    """Puts itself into the ASGI scope of each request. The server makes one for each connection.

    Requests whose head is too large, too slow or not HTTP get an error before the application is called. `Upgrade` is
    ignored, as RFC 9110 §7.8 allows, because no upgrade is supported.
    """

    head_seconds: float = HEAD_SECONDS
    send_seconds: float = SEND_SECONDS
    error_forms = ErrorForms()
    _head_bytes = 0  # of the head that is being read
    _is_in_head = False
    _is_upgrade = False  # the request that is being read asks for one
    _head_timer: asyncio.TimerHandle | None = None
    _send_timer: asyncio.TimerHandle | None = None  # runs while the transport's buffer is full
    _unread = 0  # bytes of that buffer when the timer started
    _writer: ResponseWriter | None = None

    @property
    def writer(self) -> ResponseWriter | None:
        """The writer of the stream of the current response; None if there is no stream."""
        return self._writer

    @writer.setter
    def writer(self, writer: ResponseWriter | None) -> None:
        self._writer = writer
        if writer is not None and self.scope["http_version"] == "1.0":
            self.cycle.chunked_encoding = False  # the stream ends with the connection

    # asyncio's notifications

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._start_head_timer()

    def data_received(self, data: bytes) -> None:
        is_rest = self.cycle is not None and self.cycle.response_complete and self.cycle.more_body
        if not is_rest:  # what is left of a body that was answered early gives its connection no more time
            self._unset_keepalive_if_required()
        if self.transport.is_closing():
            return
        began_before = self._is_in_head
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._read_without_upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, GatewayError) else MalformedHttp(f"This is not HTTP/1.1: {error}"))
            return
        if began_before and self._is_in_head:
            try:
                self._count_head(len(data))
            except HeadersTooLarge as error:
                self._refuse(error)

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.writer is not None:
            self.writer.pause()
        self._start_send_timer()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._stop_send_timer()
        if self.writer is not None:
            self.writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_head_timer()
        self._stop_send_timer()
        if self.writer is not None:
            self.writer.pause()
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()  # closes the transport, which waits until the client has read everything
        self._start_send_timer()

    # The parser's notifications. What they raise ends `feed_data`.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]
        self._head_bytes, self._is_in_head, self._is_upgrade = 0, True, False
        if self._head_timer is None:
            self._start_head_timer()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > MAX_HEADERS:
            raise HeadersTooLarge(f"The request must not have more than {MAX_HEADERS} headers.")

    def on_headers_complete(self) -> None:
        self._is_in_head = False
        self._stop_head_timer()
        names = [name for name, _ in self.headers]
        if names.count(b"host") > 1:
            raise MalformedHttp("The request has more than one Host header.")
        self._is_upgrade = self.parser.should_upgrade() and b"upgrade" in names
        if not self._is_upgrade:  # else the parser takes the body for another protocol's
            super().on_headers_complete()

    def on_message_complete(self) -> None:
        if not self._is_upgrade:
            super().on_message_complete()
            self.cycle.more_body = False  # uvicorn leaves that out once the request is answered

    def _read_without_upgrade(self, rest: bytes) -> None:
        """Parse the request again from its parsed head, without the headers that ask for an upgrade."""
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        lines += [name + b": " + value for name, value in self.headers if name not in _UPGRADE]
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self.data_received(b"\r\n".join(lines) + b"\r\n\r\n" + rest)

    def _count_head(self, num_bytes: int) -> None:
        self._head_bytes += num_bytes
        if self._head_bytes > MAX_HEAD_BYTES:
            raise HeadersTooLarge(f"The request's line and headers must not have more than {MAX_HEAD_BYTES} bytes.")

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(self.head_seconds, self._on_slow_head)

    def _stop_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _start_send_timer(self) -> None:
        self._unread = self.transport.get_write_buffer_size()
        if self._unread and self._send_timer is None:
            self._send_timer = self.loop.call_later(self.send_seconds, self._on_unread)

    def _stop_send_timer(self) -> None:
        if self._send_timer is not None:
            self._send_timer.cancel()
            self._send_timer = None

    def _on_unread(self) -> None:
        """End the connection, which also frees what a request that is being answered holds. A whole body may take
        longer, as long as the client reads some of it; a stream must have room again."""
        self._send_timer = None
        if self.writer is None and self.transport.get_write_buffer_size() < self._unread:
            self._start_send_timer()
            return
        client = host_and_port(*self.client) if self.client else "unknown"
        _log.warning("connection of %s aborted: it has read too little for %g s", client, self.send_seconds)
        self.transport.abort()

    def _on_slow_head(self) -> None:
        self._head_timer = None
        if self._is_in_head:
            self._refuse(RequestTimeout("The rest of the request's headers did not arrive in time."))
        else:  # nothing was sent
            self.transport.close()

    def _refuse(self, error: GatewayError) -> None:
        """Send the error and close the connection, or only close it if a response is under way."""
        unanswered = self.cycle is not None and not self.cycle.response_complete
        if unanswered and not self.cycle.response_started and not self.pipeline:  # its body is no HTTP
            self.cycle.disconnected = True
            self.cycle.message_event.set()
            unanswered = False
        if not unanswered:
            body = orjson.dumps(self._error_body(error))
            head = b"content-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n" % len(body)
            self.transport.write(STATUS_LINE[error.status] + head + body)
        self._stop_head_timer()
        self.transport.close()

    def _error_body(self, error: GatewayError) -> dict[str, Any]:
        path = getattr(self, "url", b"").partition(b"?")[0]
        form = self.error_forms.at(path.decode("latin-1"))
        return error.to_dict() if form is None else form.body(error.status, error.message, secrets.token_hex(16))
