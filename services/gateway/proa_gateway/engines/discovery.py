"""Which engines there are, by flags or by a Kubernetes Service, and the channels to them."""

import asyncio
import logging
import random
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from proa.addresses import host_and_port
from proa.tls import TlsSource

if TYPE_CHECKING:
    from kubernetes.client import Configuration, DiscoveryV1Api, V1EndpointSlice
    from kubernetes.watch import Watch


ChannelOptions = Sequence[tuple[str, Any]]
OpenChannel = Callable[[str, ChannelOptions], grpc.aio.Channel]
"""Called with an engine's address, `host:port`."""

CHANNEL_OPTIONS: ChannelOptions = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.max_send_message_length", -1),
    # A node that loses power sends no FIN. gRPC's own threads send and answer these pings, however busy Python is on
    # either side, so an engine that is only late with its heartbeat is not taken for dead.
    ("grpc.keepalive_time_ms", 1000),
    ("grpc.keepalive_timeout_ms", 1500),
    # For gRPC's bandwidth probe pings: no keepalive ping is sent while one of these is unanswered.
    ("grpc.http2.ping_timeout_ms", 1500),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.enable_http_proxy", 0),
    # Every attempt opens a new connection: the client decides when to reconnect, not a subchannel shared with an
    # earlier attempt.
    ("grpc.use_local_subchannel_pool", 1),
)
_SERVICE_LABEL = "kubernetes.io/service-name"
_CONNECT_TIMEOUT = 3.0  # seconds, like all below
_LIST_TIMEOUT = 10.0
_CLOSE_TIMEOUT = 2.0
_MAX_DELAY = 5.0
_MAX_ANNOTATIONS = 20  # in one call
_DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


class TlsChannels:
    """Opens TLS channels. Reads the certificate files for each channel, so new ones need no restart.

    Engines are reached by IP address, so all their certificates are for one name, `server_name`.
    """

    def __init__(self, source: TlsSource, server_name: str) -> None:
        self._source = source
        self._server_name = server_name

    def __call__(self, address: str, options: ChannelOptions) -> grpc.aio.Channel:
        identity = self._source.current()
        credentials = grpc.ssl_channel_credentials(identity.authority, identity.key, identity.certificate)
        named = [*options, ("grpc.ssl_target_name_override", self._server_name)]
        return grpc.aio.secure_channel(address, credentials, options=named)


def insecure_channels(address: str, options: ChannelOptions) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=options)


def describe_error(error: BaseException) -> str:
    """Return one line about why a connection failed."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One engine. A pod that was replaced under the same name has another UID, so it is another endpoint."""

    address: str  # host:port
    uid: str  # the pod's, or the address
    terminating: bool = False  # its pod is being deleted


class Discovery(Protocol):
    """A source of endpoints."""

    def endpoints(self) -> AsyncGenerator[frozenset[Endpoint], None]:
        """Yield all endpoints once they are known and after each change; never ends.

        Only the latest set is kept for a slow consumer.
        """
        ...

    async def set_deletion_costs(self, costs: Mapping[str, int]) -> None:
        """Annotate the endpoints' pods with these costs, by the endpoints' UIDs. Errors are logged."""

    async def close(self) -> None: ...


class StaticDiscovery:
    """Engines at fixed addresses, `host:port`."""

    def __init__(self, addresses: Sequence[str]) -> None:
        self._endpoints = frozenset(Endpoint(address, address) for address in addresses)

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint], None]:
        yield self._endpoints
        await asyncio.Event().wait()

    async def set_deletion_costs(self, costs: Mapping[str, int]) -> None:
        """There are no pods."""

    async def close(self) -> None:
        pass


class EndpointSliceDiscovery:
    """The endpoints of one Service, by list and watch; lists again every `relist_seconds` and after every error.

    While the API server cannot be reached the last known set stays. Endpoints that are not ready are included, because
    the gateway finds out by connecting. `configuration`: of the API server; None: in-cluster, else the kubeconfig.
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
        self._slices: dict[str, V1EndpointSlice] = {}  # by name; used on the thread only
        self._api: DiscoveryV1Api | None = None  # None until the thread has connected, like `_watch`
        self._pods: Mapping[str, str] = {}  # names by UID; replaced on the thread
        self._costs: dict[str, int] = {}  # as written, by UID
        self._may_annotate = True  # False once the API server has refused it
        self._watch: Watch | None = None
        self._stopping = threading.Event()  # ends the thread
        self._thread: threading.Thread | None = None  # None until `endpoints` is called
        self._latest: frozenset[Endpoint] | None = None  # used in the event loop only
        self._changed = asyncio.Event()  # `_latest` was set

    async def endpoints(self) -> AsyncGenerator[frozenset[Endpoint], None]:
        """Starts the thread. There can be one consumer at a time."""
        if self._thread is None:
            arguments = (asyncio.get_running_loop(),)
            self._thread = threading.Thread(target=self._run, args=arguments, name="discovery", daemon=True)
            self._thread.start()
        last: frozenset[Endpoint] | None = None
        while True:
            if self._latest is not None and self._latest != last:
                last = self._latest
                yield last
            await self._changed.wait()
            self._changed.clear()

    async def set_deletion_costs(self, costs: Mapping[str, int]) -> None:
        """Writes those that have changed, at most `_MAX_ANNOTATIONS` of them; the rest is written by later calls. Stops
        for good if the gateway may not annotate pods."""
        pods, api = self._pods, self._api
        if api is None or not self._may_annotate:
            return
        self._costs = {uid: cost for uid, cost in self._costs.items() if uid in pods}
        changed = [uid for uid in pods if uid in costs and costs[uid] != self._costs.get(uid)]
        for uid in changed[:_MAX_ANNOTATIONS]:
            if self._may_annotate:
                await asyncio.to_thread(self._annotate, api, uid, pods[uid], costs[uid])

    def _annotate(self, api: "DiscoveryV1Api", uid: str, pod: str, cost: int) -> None:
        """On any thread."""
        from kubernetes import client

        body = {"metadata": {"annotations": {_DELETION_COST: str(cost)}}}
        timeout = (_CONNECT_TIMEOUT, _LIST_TIMEOUT)
        try:
            client.CoreV1Api(api.api_client).patch_namespaced_pod(pod, self._namespace, body, _request_timeout=timeout)
        except Exception as error:
            if isinstance(error, client.ApiException) and error.status == HTTPStatus.FORBIDDEN:
                self._may_annotate = False
                _log.warning("deletion costs are not written: the gateway may not patch pods: %s", _first_lines(error))
            else:
                _log.warning("deletion cost of pod %s was not written: %s", pod, _first_lines(error))
        else:
            self._costs[uid] = cost

    async def close(self) -> None:
        """Stop the thread. One that waits for the API server is left running after `_CLOSE_TIMEOUT`."""
        self._stopping.set()
        deadline = time.monotonic() + _CLOSE_TIMEOUT
        while self._thread is not None and self._thread.is_alive() and time.monotonic() < deadline:
            if self._watch is not None:
                self._watch.stop()
            await asyncio.sleep(0.02)

    def _run(self, loop: asyncio.AbstractEventLoop) -> None:
        """The thread: list and watch until stopped. Errors are logged and retried with exponential backoff."""
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
                    _log.warning("discovery failed, listing again: service %s: %s", self._service, _first_lines(error))
            lasted = time.monotonic() - started
            delay = 0.0 if lasted > _MAX_DELAY else min(max(0.1, 2 * delay), _MAX_DELAY)

    def _connect(self) -> "DiscoveryV1Api":
        """Create the API client once. The import takes most of a second, so it is done here, on the thread."""
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
        """Replace all slices. Return the list's resource version."""
        answer = api.list_namespaced_endpoint_slice(
            self._namespace,
            label_selector=f"{_SERVICE_LABEL}={self._service}",
            _request_timeout=(_CONNECT_TIMEOUT, _LIST_TIMEOUT),
        )
        self._slices = {_name(item): item for item in answer.items}
        self._publish(loop)
        assert answer.metadata is not None
        return str(answer.metadata.resource_version)

    def _follow(self, api: "DiscoveryV1Api", version: str, loop: asyncio.AbstractEventLoop) -> None:
        """Apply changes since `version` until the API server ends the watch. Raises ApiException, also for 410 Gone."""
        assert self._watch is not None
        events = self._watch.stream(
            api.list_namespaced_endpoint_slice,
            self._namespace,
            label_selector=f"{_SERVICE_LABEL}={self._service}",
            resource_version=version,
            timeout_seconds=self._relist_seconds,
            _request_timeout=(_CONNECT_TIMEOUT, self._relist_seconds + _LIST_TIMEOUT),
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
        self._pods = _pods_of(self._slices.values())

        def deliver() -> None:
            self._latest = endpoints
            self._changed.set()

        if not self._stopping.is_set():
            loop.call_soon_threadsafe(deliver)


def endpoints_of(slices: Iterable["V1EndpointSlice"], port: int) -> frozenset[Endpoint]:
    """Return each pod of the slices once: by IPv4 address if it has one, terminating if any slice marks it so."""
    found: dict[str, Endpoint] = {}
    for item in sorted(slices, key=lambda item: str(item.address_type)):
        for endpoint in item.endpoints or ():
            host = endpoint.addresses[0]
            address = host_and_port(host, port)
            uid = (endpoint.target_ref and endpoint.target_ref.uid) or address
            terminating = bool(endpoint.conditions and endpoint.conditions.terminating)
            before = found.get(uid, Endpoint(address, uid))
            found[uid] = Endpoint(before.address, uid, terminating or before.terminating)
    return frozenset(found.values())


def _pods_of(slices: Iterable["V1EndpointSlice"]) -> dict[str, str]:
    """Return the names of the slices' pods, by UID."""
    targets = [endpoint.target_ref for item in slices for endpoint in item.endpoints or ()]
    return {one.uid: one.name for one in targets if one is not None and one.uid and one.name}


def _name(item: "V1EndpointSlice") -> str:
    assert item.metadata is not None
    return str(item.metadata.name)


def _first_lines(error: Exception) -> str:
    """Return the first two lines, joined: an ApiException is often a page long."""
    return f"{type(error).__name__}: {' '.join(str(error).strip().splitlines()[:2])}"
