"""GatewayConfig: every choice of a gateway, made once, passed explicitly."""

from dataclasses import dataclass, field
from pathlib import Path

from proa.tls import TlsFiles


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """How long each wait may last, in seconds."""

    connect: float = 3.0  # to an engine, until its Hello
    heartbeat: float = 10.0  # of silence on a session that lives; engines speak every 0.5 s, a starved one later
    failover: float = 30.0  # for an engine that can go on with what a lost one began
    scale_from_zero: float = 0.0  # for the first engine of a model; 0: requests are not held
    queue: float = 60.0  # for a turn in the gateway's own queue
    request: float = 3600.0  # from its arrival to its last token; clients may ask for less
    first_token: float = 600.0  # queueing in the engine and prefill included
    next_token: float = 120.0
    slow_reader: float = 120.0  # for a client that takes nothing of what waits for it
    shutdown: float = 30.0  # for running streams to end after SIGTERM


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """What the command line and the tests ask for. Engines are given by address or found by Service, not both."""

    engines: tuple[str, ...] = ()  # host:port
    engine_service: str | None = None  # name.namespace:port
    host: str = "0.0.0.0"
    port: int = 8000
    tokenizer: Path | None = None  # folder; None: from the engine
    routing: str = "prefix"  # a policy's name
    stream_interval: int = 1  # tokens merged into one event on purpose
    models: tuple[str, ...] = ()  # names that are known though no engine has brought them yet
    api_keys: Path | None = None  # file; None: no key is asked for
    max_concurrent_requests: int = 2048  # output sequences, those that wait included
    max_waiting_requests: int = 1024  # for the engines to have room
    max_queued_tokens: int = 4_194_304  # prompt tokens of the sequences that wait so
    tls: TlsFiles | None = None  # to the engines; None: plaintext
    tls_server_name: str = "proa-engine"  # in the certificates of all engines
    max_body_bytes: int = 16 * 1024 * 1024
    max_choices: int = 128  # prompts times n of one request
    deadlines: Deadlines = field(default_factory=Deadlines)
