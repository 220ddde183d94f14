"""A fake Kubernetes API server: list and watch of EndpointSlices in one namespace, and patches of pods, with the
failures of real servers."""

import json
import queue
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

LABEL = "kubernetes.io/service-name"


def endpoint(
    host: str,
    *,
    pod: str | None = None,
    uid: str | None = None,
    ready: bool | None = True,
    serving: bool | None = None,
    terminating: bool | None = None,
) -> dict[str, Any]:
    conditions = {"ready": ready, "serving": serving, "terminating": terminating}
    body: dict[str, Any] = {"addresses": [host], "conditions": {k: v for k, v in conditions.items() if v is not None}}
    if pod:
        body["targetRef"] = {"kind": "Pod", "name": pod, "uid": uid or f"uid-of-{pod}"}
    return body


class FakeKubeApi:
    """Serves on 127.0.0.1 in threads. `put` and `delete` change the slices and notify the watches."""

    def __init__(self) -> None:
        self.lists = 0
        self.watches = 0
        self.unreachable = False  # close every new connection without a response
        self.broken = False  # respond to every new request with 500
        self.gone_next_watch = False  # the next watch gets an ERROR event, 410 Gone
        self.answering = threading.Event()  # cleared: list requests hang
        self.answering.set()
        self.selectors: list[str] = []
        self.patches: list[tuple[str, dict[str, Any]]] = []  # path and body
        self.patch_status = 200
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 1
        self._history: list[tuple[int, dict[str, Any]]] = []
        self._watchers: list[queue.Queue[dict[str, Any] | None]] = []
        self._lock = threading.Lock()
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FakeKubeApi":
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.answering.set()
        self.drop_watches()
        self._server.shutdown()
        self._server.server_close()

    def put(self, name: str, *endpoints: dict[str, Any], service: str = "engine", notify: bool = True) -> None:
        """Create or replace a slice. `notify=False`: watches miss the event."""
        with self._lock:
            self._version += 1
            kind = "MODIFIED" if name in self._slices else "ADDED"
            ipv6 = any(":" in endpoint["addresses"][0] for endpoint in endpoints)
            self._slices[name] = {
                "apiVersion": "discovery.k8s.io/v1",
                "kind": "EndpointSlice",
                "metadata": {"name": name, "labels": {LABEL: service}, "resourceVersion": str(self._version)},
                "addressType": "IPv6" if ipv6 else "IPv4",
                "endpoints": list(endpoints),
                "ports": [{"name": "grpc", "port": 50051, "protocol": "TCP"}],
            }
            self._notify(kind, self._slices[name], notify)

    def delete(self, name: str, *, notify: bool = True) -> None:
        with self._lock:
            self._version += 1
            self._notify("DELETED", self._slices.pop(name), notify)

    def drop_watches(self) -> None:
        """Close every open watch without an end."""
        with self._lock:
            for watcher in self._watchers:
                watcher.put(None)
            self._watchers.clear()

    @property
    def num_watchers(self) -> int:
        return len(self._watchers)

    def _notify(self, kind: str, body: dict[str, Any], notify: bool) -> None:
        if notify:
            event = {"type": kind, "object": body}
            self._history.append((self._version, event))
            for watcher in self._watchers:
                watcher.put(event)

    def _subscribe(self, version: int) -> "queue.Queue[dict[str, Any] | None]":
        """Return a queue of the events after `version`, past and future."""
        events: queue.Queue[dict[str, Any] | None] = queue.Queue()
        with self._lock:
            self._watchers.append(events)
            for moment, event in self._history:
                if moment > version:
                    events.put(event)
        return events

    def _handler(api) -> type[BaseHTTPRequestHandler]:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                query = {key: values[0] for key, values in parse_qs(urlsplit(self.path).query).items()}
                api.selectors.append(query.get("labelSelector", ""))
                if api.unreachable:
                    self.close_connection = True
                elif api.broken:
                    self._answer(500, {"kind": "Status", "status": "Failure", "code": 500})
                elif query.get("watch") in ("true", "True"):
                    self._watch(int(query["resourceVersion"]), float(query.get("timeoutSeconds", "60")))
                else:
                    api.answering.wait(30)
                    api.lists += 1
                    with api._lock:
                        items = list(api._slices.values())
                        metadata = {"resourceVersion": str(api._version)}
                    kind = {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSliceList"}
                    self._answer(200, {**kind, "metadata": metadata, "items": items})

            def do_PATCH(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                api.patches.append((urlsplit(self.path).path, body))
                self._answer(api.patch_status, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}})

            def _answer(self, status: int, body: dict[str, Any]) -> None:
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def _watch(self, version: int, seconds: float) -> None:
                api.watches += 1
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Transfer-Encoding", "chunked")
                self.end_headers()
                self.wfile.flush()
                if api.gone_next_watch:
                    api.gone_next_watch = False
                    status = {"kind": "Status", "code": 410, "reason": "Expired", "message": "too old resource version"}
                    self._event({"type": "ERROR", "object": status})
                events = api._subscribe(version)
                try:
                    while (event := events.get(timeout=seconds)) is not None:
                        self._event(event)
                    self.close_connection = True  # in the middle of a chunked body: a broken connection
                except queue.Empty:
                    self.wfile.write(b"0\r\n\r\n")
                except OSError:
                    self.close_connection = True

            def _event(self, event: dict[str, Any]) -> None:
                data = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
                self.wfile.flush()

            def log_message(self, format: str, *arguments: object) -> None:
                pass

        return Handler
