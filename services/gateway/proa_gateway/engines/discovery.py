"""Discovery: which engines there are. A fixed list of addresses, or the EndpointSlices of a Service.

The only file here that knows Kubernetes. It does not connect to engines: it says where they are and whether they are
on their way out. The Kubernetes client blocks, so it lives on a thread; sets of endpoints cross to the event loop.
"""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from kubernetes.client import Configuration, DiscoveryV1Api, V1EndpointSlice
    from kubernetes.watch import Watch

_SERVICE_LABEL = "kubernetes.io/service-name"
_CONNECT_SECONDS = 3.0
_LIST_SECONDS = 10.0
_MAX_DELAY_SECONDS = 5.0
_CLOSE_SECONDS = 2.0
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine. A pod that was replaced under the same name has another `uid`, so it is another endpoint."""

    address: str  # host:port
    name: str  # the pod's, or the address
    uid: str  # the pod's, or the address
    ready: bool = True  # its pod passes its readiness probe
    terminating: bool = False  # give it nothing new


class Discovery(Protocol):
    """Where engines come from."""

    def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """Yields all endpoints as soon as they are known, and again after each change; never ends by itself.

        Steps that were not consumed in time are skipped: only the latest set is ever waiting.
        """
        ...

    async def close(self) -> None: ...


class StaticDiscovery:
    """Engines at fixed addresses, `host:port`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = frozenset(Endpoint(address, address, address) for address in addresses)

    async def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        yield self._endpoints
        await asyncio.Event().wait()

    async def close(self) -> None:
        pass


class EndpointSliceDiscovery:
    """The endpoints of one Service, by list, watch and a relist every `relist_seconds` and after every error.

    While the API server is away the last known set stays. `configuration` is how to reach the API server; None: as a
    pod does, else by the kubeconfig. Not-ready endpoints are included; terminating ones are too, and marked.
    """

    def __init__(
        self,
        service: str,
        namespace: str,
        port: int,
        *,
        configuration: "Configuration | None" = None,
        relist_seconds: int = 60,
    ) -> None:
        self._service = service
        self._namespace = namespace
        self._port = port
        self._configuration = configuration
        self._relist_seconds = relist_seconds
        self._slices: dict[str, V1EndpointSlice] = {}  # by name; the thread's own
        self._api: DiscoveryV1Api | None = None
        self._watch: Watch | None = None
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._latest: frozenset[Endpoint] | None = None  # the event loop's own
        self._changed = asyncio.Event()

    async def endpoints(self) -> AsyncIterator[frozenset[Endpoint]]:
        """For one consumer. Starts the thread."""
        loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._run, args=(loop,), name="discovery", daemon=True)
        self._thread.start()
        last: frozenset[Endpoint] | None = None
        while True:
            await self._changed.wait()
            self._changed.clear()
            if self._latest is not None and self._latest != last:
                last = self._latest
                yield last

    async def close(self) -> None:
        """Stop the thread. A call to an API server that does not answer is left behind after `_CLOSE_SECONDS`."""
        self._stopping.set()
        deadline = time.monotonic() + _CLOSE_SECONDS
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            if self._watch is not None:
                self._watch.stop()
            await asyncio.sleep(0.02)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: list and watch until told to stop. Whatever goes wrong is logged and tried again."""
        delay = 0.0
        while not self._stopping.wait(delay * random.uniform(0.5, 1.0)):
            started = time.monotonic()
            try:
                api = self._connect()
                version = self._list(api, loop)
                if not self._stopping.is_set():
                    self._follow(api, version, loop)
            except Exception as error:
                if not self._stopping.is_set():
                    _log.warning("endpoints of %s: %s; listing again", self._service, _sentence(error))
            lived = time.monotonic() - started
            delay = 0.0 if lived > _MAX_DELAY_SECONDS else min(max(0.1, 2 * delay), _MAX_DELAY_SECONDS)

    def _connect(self) -> "DiscoveryV1Api":
        """The API, the same one each time. Imports the client here, on the thread: that takes most of a second."""
        if self._api is None:
            from kubernetes import client, config, watch

            configuration = self._configuration or client.Configuration()
            if self._configuration is None:
                try:
                    config.load_incluster_config(client_configuration=configuration)
                except config.ConfigException:
                    config.load_kube_config(client_configuration=configuration)
            self._watch = watch.Watch()
            self._api = client.DiscoveryV1Api(client.ApiClient(configuration))
        return self._api

    def _list(self, api: "DiscoveryV1Api", loop: asyncio.AbstractEventLoop) -> str:
        """Replace all slices; returns the list's resource version."""
        answer = api.list_namespaced_endpoint_slice(
            self._namespace,
            label_selector=f"{_SERVICE_LABEL}={self._service}",
            _request_timeout=(_CONNECT_SECONDS, _LIST_SECONDS),
        )
        self._slices = {_name(item): item for item in answer.items}
        self._publish(loop)
        assert answer.metadata is not None
        return str(answer.metadata.resource_version)

    def _follow(self, api: "DiscoveryV1Api", version: str, loop: asyncio.AbstractEventLoop) -> None:
        """Apply changes since `version` until the API server ends the watch. Raises ApiException, 410 among others."""
        assert self._watch is not None
        events = self._watch.stream(
            api.list_namespaced_endpoint_slice,
            self._namespace,
            label_selector=f"{_SERVICE_LABEL}={self._service}",
            resource_version=version,
            timeout_seconds=self._relist_seconds,
            _request_timeout=(_CONNECT_SECONDS, self._relist_seconds + _LIST_SECONDS),
        )
        for event in events:
            self._apply(event)
            self._publish(loop)
            if self._stopping.is_set():
                return

    def _apply(self, event: Mapping[str, Any]) -> None:
        item: V1EndpointSlice = event["object"]
        if event["type"] == "DELETED":
            self._slices.pop(_name(item), None)
        elif event["type"] in ("ADDED", "MODIFIED"):
            self._slices[_name(item)] = item

    def _publish(self, loop: asyncio.AbstractEventLoop) -> None:
        endpoints = endpoints_of(self._slices.values(), self._port)

        def deliver() -> None:
            self._latest = endpoints
            self._changed.set()

        if not self._stopping.is_set():
            loop.call_soon_threadsafe(deliver)


def endpoints_of(slices: Iterable["V1EndpointSlice"], port: int) -> frozenset[Endpoint]:
    """The endpoints that slices name, each pod once: IPv4 before IPv6, and terminating if any slice says so."""
    found: dict[str, Endpoint] = {}
    for item in sorted(slices, key=lambda item: str(item.address_type)):
        for endpoint in item.endpoints or ():
            host = endpoint.addresses[0]
            address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
            target = endpoint.target_ref
            name = (target and target.name) or address
            uid = (target and target.uid) or address
            conditions = endpoint.conditions
            terminating = bool(conditions and conditions.terminating)
            before = found.get(uid)
            found[uid] = Endpoint(
                address=before.address if before else address,
                name=name,
                uid=uid,
                ready=not terminating and _is_serving(conditions) and (before is None or not before.terminating),
                terminating=terminating or (before is not None and before.terminating),
            )
    return frozenset(found.values())


def _name(item: "V1EndpointSlice") -> str:
    assert item.metadata is not None
    return str(item.metadata.name)


def _is_serving(conditions: Any) -> bool:
    """Whether the pod is ready. With publishNotReadyAddresses `ready` is always true, so `serving` says it."""
    if conditions is None:
        return True
    known = conditions.serving if conditions.serving is not None else conditions.ready
    return known is None or bool(known)


def _sentence(error: Exception) -> str:
    """One line of what is often a page."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {' '.join(lines[:2])}" if lines else type(error).__name__
