"""uvicorn's HTTP protocol as the `Connection` of its responses."""

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from proa_gateway.streaming import CONNECTION, ResponseWriter


class HttpProtocol(HttpToolsProtocol):
    """Puts itself into the ASGI scope of each request. The server makes one for each connection."""

    writer: ResponseWriter | None = None

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope[CONNECTION] = self  # type: ignore[typeddict-unknown-key]

    def pause_writing(self) -> None:
        super().pause_writing()
        if self.writer is not None:
            self.writer.pause()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.writer is not None:
            self.writer.resume()

    def connection_lost(self, exc: Exception | None) -> None:
        if self.writer is not None:
            self.writer.pause()
        super().connection_lost(exc)
