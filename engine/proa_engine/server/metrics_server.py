"""The HTTP server of the Prometheus metrics."""

from collections.abc import Callable

from prometheus_client import CollectorRegistry, start_http_server


def serve_metrics(registry: CollectorRegistry, host: str, port: int) -> Callable[[], None]:
    """Serve GET /metrics on a thread; return a function that stops it. Raises OSError if the port cannot be bound."""
    server, thread = start_http_server(port, addr=host, registry=registry)

    def stop() -> None:
        server.shutdown()
        server.server_close()
        thread.join()

    return stop
