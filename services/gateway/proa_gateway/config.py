"""GatewayConfig: the configuration of one gateway process. Each field is also a flag of `proa-gateway serve`."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Self

from proa.logs import LogOptions
from proa.lora_module import LoraModule
from proa.options import check_options, masked_repr, option, parse_count
from proa.tls import TlsFiles
from proa.tokenizer_formats.convert import OTHER_FILES
from proa_gateway.audio.config import AudioOptions
from proa_gateway.http.middleware import parse_host_pattern
from proa_gateway.images.config import ImageOptions
from proa_gateway.routing.policies import POLICIES
from proa_gateway.scaler.config import ScalerOptions

_ADDRESS = re.compile(r".+:[0-9]+")
_SERVICE = re.compile(r"[^.:]+\.[^:]+:[0-9]+")


@dataclass(frozen=True, slots=True)
class Strings:
    values: tuple[str, ...] = ()  # an option's value, written as a list in JSON

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Raises `ValueError`."""
        message = f"{text!r} is not a list of strings as JSON"
        try:
            values = json.loads(text)
        except ValueError:
            raise ValueError(message) from None
        if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
            raise ValueError(message)
        return cls(tuple(values))

    def __str__(self) -> str:
        return json.dumps(self.values)


@dataclass(frozen=True, slots=True, kw_only=True)
class Cors:
    """vLLM's flags."""

    allowed_origins: Strings = option(
        Strings(),
        'origins of the pages that may use the API, as JSON; ["*"] for all',
        metavar="JSON",
        parse=Strings.from_json,
    )
    allow_credentials: bool = option(False, "let these pages send cookies")
    allowed_methods: Strings = option(
        Strings(("*",)),
        "methods that these pages may use, as JSON",
        metavar="JSON",
        parse=Strings.from_json,
    )
    allowed_headers: Strings = option(
        Strings(("*",)),
        "headers that these pages may send, as JSON",
        metavar="JSON",
        parse=Strings.from_json,
    )

    def __post_init__(self) -> None:
        check_options(self)


def parse_address(text: str) -> str:
    if not _ADDRESS.fullmatch(text):
        raise ValueError(f"{text!r} is not HOST:PORT")
    return text


def _service(text: str) -> str:
    if not _SERVICE.fullmatch(text):
        raise ValueError(f"{text!r} is not NAME.NAMESPACE:PORT")
    return text


def parse_tokenizer_folder(text: str) -> Path:
    if not any((Path(text) / name).is_file() for name in ("tokenizer.json", *OTHER_FILES)):
        raise ValueError(f"there is no tokenizer.json in {text!r}")
    return Path(text)


def _chat_template(text: str) -> str:
    """The template in the file called `text`, or `text` if it is a template itself. Raises `ValueError` for one that
    cannot be used."""
    from proa.chat_template import MAX_SOURCE, ChatTemplate  # imports Jinja, which --help does not need

    source = text
    if "{" not in text and "\n" not in text:
        if not Path(text).is_file():
            raise ValueError(f"{text!r} is neither a file nor a template")
        try:
            with Path(text).open(encoding="utf-8") as file:
                source = file.read(MAX_SOURCE + 1)
        except UnicodeDecodeError as error:
            raise ValueError(f"{text!r} is not valid UTF-8: {error}") from error
    ChatTemplate(source)
    return source


def _api_key(text: str) -> str:
    if not text.isascii() or not text.isprintable() or not text.strip():
        raise ValueError("an API key has printable ASCII characters")
    return text.strip()


def _root_path(text: str) -> str:
    if text and (not text.startswith("/") or text.endswith("/")):
        raise ValueError(f"{text!r} must begin with a slash and end without one")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class Deadlines:
    """Time limits in seconds. Raises `ValueError` for a value that is negative or not finite."""

    queue: float = option(60.0, "time a request may wait in the queue; then 503", flag="--queue-timeout", minimum=0)
    scale_from_zero: float = option(
        0.0,
        "time a request for a known model waits for its first engine; 0: 503 at once",
        flag="--scale-from-zero-timeout",
        minimum=0,
    )
    request: float = option(
        3600.0,
        "time from a request's arrival to its last token; clients may ask for less with the header x-request-timeout",
        flag="--request-timeout",
        minimum=0,
    )
    first_token: float = option(
        600.0,
        "time from sending a request to an engine to its first token, prefill and the engine's queue included",
        flag="--first-token-timeout",
        minimum=0,
    )
    next_token: float = option(120.0, "time between two tokens", flag="--next-token-timeout", minimum=0)
    shutdown: float = option(30.0, "time for running requests to end after SIGTERM", flag="--drain-timeout", minimum=0)
    connect: float = option(3.0, "time from opening a session with an engine to its Hello message", internal=True)
    heartbeat: float = option(
        10.0,
        "time without a message on a session until the engine counts as lost; engines send one every 0.5 s",
        internal=True,
    )
    failover: float = option(30.0, "time to find an engine that resumes the sequences of a lost one", internal=True)
    load_lora: float = option(
        310.0, "time for an engine to load an adapter, which it gives up itself after 300 s", internal=True
    )
    send: float = option(
        60.0,
        "time a client may read nothing of a response while more waits than buffers hold; then its connection is "
        "closed",
        flag="--send-timeout",
        minimum=0.001,
    )

    def __post_init__(self) -> None:
        check_options(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayConfig:
    """Raises `ValueError` for a value out of range. `engines` and `engine_service` exclude each other."""

    engines: tuple[str, ...] = option(
        (),
        "address of an engine; repeat for several",
        flag="--engine",
        metavar="HOST:PORT",
        parse=parse_address,
        exclusive="engines",
    )
    engine_service: str | None = option(
        None,
        "Kubernetes Service whose endpoints are the engines",
        metavar="NAME.NAMESPACE:PORT",
        parse=_service,
        exclusive="engines",
    )
    pod_deletion_cost: bool = option(
        False,
        "annotate the engines' pods with how much their caches were used in the last ten minutes, so that a scale-down "
        "removes the one that was used least; needs --engine-service",
    )
    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(8000, "port to listen on", minimum=0, maximum=65535)
    allowed_hosts: tuple[str, ...] = option(
        (),
        "name under which clients reach the gateway, such as llm.example.com; *.example.com: all names below it; *: "
        "any name. Without API keys, requests under other names get 403; IP addresses, localhost, names without a dot, "
        "this machine's name and that of --host need not be given; repeat for several",
        metavar="NAME",
        parse=parse_host_pattern,
    )
    health_port: int = option(
        0,
        "port that answers /health and /ready for probes, also while the gateway is very busy; 0: none",
        minimum=0,
        maximum=65535,
    )
    tokenizer: Path | None = option(
        None,
        "folder with the model's tokenizer (default: download it from the engine)",
        metavar="FOLDER",
        parse=parse_tokenizer_folder,
    )
    routing: str = option(
        "prefix",
        "how to choose an engine for a request: by cached prompt blocks and load, by load, in turn, or by session",
        choices=POLICIES,
    )
    session_admission: Literal["off", "retain", "wait"] = option(
        "off",
        "`retain`: blocks of conversations are evicted after those of other requests, as far as all fit; `wait`: turns "
        "of the others wait for a place; both need --routing prefix",
    )
    session_max_wait: float = option(
        120.0, "seconds after which a turn of a conversation goes on without a place", minimum=0
    )
    kv_transfer_bandwidth: float = option(
        1.0,
        "GB/s at which engines are expected to fetch KV cache blocks from each other, until it is measured; 0: they "
        "fetch none",
        minimum=0,
    )
    min_remote_prefill_tokens: int = option(
        1024,
        "a prompt is sent to an engine of the role prefill only if the engine that generates lacks more of its tokens",
        parse=parse_count,
        minimum=0,
    )
    stream_interval: int = option(1, "tokens of a sequence to collect before sending an event", minimum=1)
    sse_keep_alive_interval: float = option(
        15.0,
        "seconds without an event after which a stream gets a comment, and its status if it has none yet, so that "
        "proxies and clients keep the connection; 0: never",
        minimum=0,
    )
    max_concurrent_requests: int = option(
        2048, "limit of output sequences, running and waiting; beyond it 429", minimum=1
    )
    max_queued_tokens: int = option(
        4_194_304,
        "limit of prompt tokens of the requests in the queue, such as 4M; beyond it 429",
        parse=parse_count,
        minimum=1,
    )
    max_waiting_requests: int = option(1024, "limit of waiting requests; beyond it 429", minimum=1)
    models: tuple[str, ...] = option(
        (),
        "model name to accept before any engine serves it (scale from zero); repeat for several",
        flag="--model",
        metavar="NAME",
    )
    lora_modules: tuple[LoraModule, ...] = option(
        (),
        "adapter that an engine loads when the first request for it arrives; JSON with name, path and base_model_name "
        "if there are several models; repeat for several",
        metavar="NAME=PATH",
        parse=LoraModule.parse,
    )
    api_keys: Path | None = option(
        None,
        "JSON file with API keys, their limits and priorities, reloaded when it changes (default: no key is needed)",
        metavar="FILE",
    )
    api_key: tuple[str, ...] = option(
        (),
        "API key without a name and limits; repeat for several (default: the variable PROA_API_KEY)",
        metavar="KEY",
        parse=_api_key,
    )
    operator_key: tuple[str, ...] = option(
        (),
        "API key without a name and limits that may also call the operators' endpoints; repeat for several",
        metavar="KEY",
        parse=_api_key,
    )
    separate_prefix_caches: bool = option(
        False, "requests with one API key use no cached prompt prefixes of requests with another"
    )
    chat_template: str | None = option(
        None,
        "chat template for all models, a file or the Jinja template itself (default: each model's own)",
        metavar="FILE",
        parse=_chat_template,
    )
    trust_request_chat_template: bool = option(
        False, "run the chat templates of requests: programs in a sandbox, at most 2 s of CPU time each"
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = option(
        "auto", "contents of messages for chat templates: text (string), lists of parts (openai), or what each reads"
    )
    plain_special_tokens: bool = option(
        False,
        "encode special tokens in the texts of chats as plain text, so that only the chat template ends messages; "
        "other prompts keep theirs",
    )
    tool_call_parser: str | None = option(
        None,
        "format in which models write tool calls; an unknown name is answered with all there are (default: chosen by "
        "their chat template)",
        metavar="NAME",
    )
    reasoning_parser: str | None = option(
        None,
        "format in which models write reasoning; none: they write none; an unknown name is answered with all there are "
        "(default: that of their tool calls, if it stands in their chat template)",
        metavar="NAME",
    )
    enable_force_include_usage: bool = option(
        False, "give the usage in every event of all streams, whatever their stream_options are"
    )
    enable_per_request_metrics: bool = option(
        False, "give the times of a request as metrics in its response, in streams beside the usage"
    )
    return_tokens_as_token_ids: bool = option(
        False,
        "write token_id:5 in place of a token's text in log probabilities, unless the request says otherwise",
    )
    enable_tokenizer_info_endpoint: bool = option(
        False, "answer GET /tokenizer_info with the tokenizer's configuration and chat template"
    )
    enable_dev_endpoints: bool = option(
        False, "answer /reset_prefix_cache, /sleep, /wake_up, /is_sleeping and /server_info, for operators"
    )
    enable_runtime_lora_updating: bool = option(
        False, "answer /v1/load_lora_adapter and /v1/unload_lora_adapter, for operators"
    )
    tls_server_name: str = option("proa-engine", "name in the certificates of all engines", metavar="NAME")
    max_body_bytes: int = option(
        16 * 1024 * 1024, "limit of a request body in bytes, such as 16M; beyond it 413", parse=parse_count, minimum=1
    )
    max_stored_responses: int = option(
        10_000,
        "limit of responses kept for /v1/responses; beyond it the key with the most loses its least recently used one",
        minimum=0,
    )
    max_stored_response_bytes: int = option(
        256 * 1024 * 1024, "limit of their size in bytes, with their input", parse=parse_count, minimum=0
    )
    max_pooling_inputs: int = option(
        2048, "limit of the texts in one request for embeddings, classes or scores; beyond it 400", minimum=1
    )
    max_pooling_tokens: int = option(1_048_576, "limit of their tokens; beyond it 400", parse=parse_count, minimum=1)
    max_choices: int = option(128, "limit of prompts times n in one request", internal=True)
    access_log: bool = option(False, "write a line to standard output for each request, in the format of the log")
    root_path: str = option(
        "", "path under which a proxy serves the API, if the proxy does not remove it", metavar="PATH", parse=_root_path
    )
    cors: Cors = option(Cors(), "web pages of other origins")
    images: ImageOptions = option(ImageOptions(), "images in requests")
    audio: AudioOptions = option(AudioOptions(), "audio files in requests")
    deadlines: Deadlines = option(Deadlines(), "time limits in seconds")
    scaler: ScalerOptions = option(ScalerOptions(), "external scaler for KEDA")
    logs: LogOptions = option(LogOptions(), "logs")
    tls: TlsFiles | None = option(None, "TLS to the engines (default: plaintext)")

    __repr__ = masked_repr

    def __post_init__(self) -> None:
        check_options(self)
        if self.tls is not None and self.tls.authority is None:
            raise ValueError("--tls-cert needs --tls-ca")
        if self.pod_deletion_cost and self.engine_service is None:
            raise ValueError("--pod-deletion-cost needs --engine-service")
