"""ServeOptions: the configuration of the serving process. Each field is a flag of `proa-engine serve`."""

from dataclasses import dataclass, replace

from proa.logs import LogOptions
from proa.options import REQUIRED, check_options, option
from proa.tls import TlsFiles
from proa_engine.config import EngineConfig, PeerTls

MAX_PORT = 65535


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < float("inf"):
        raise ValueError(f"{text} is not a number of seconds above zero")
    return seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Raises `ValueError` for a value out of range. `tls` None: plaintext."""

    host: str = option("0.0.0.0", "address to listen on")
    port: int = option(50051, "gRPC port; 0: any free port", minimum=0, maximum=MAX_PORT)
    metrics_port: int = option(9400, "port of the Prometheus metrics; 0: no metrics", minimum=0, maximum=MAX_PORT)
    drain_timeout: float = option(60.0, "seconds from SIGTERM until requests that still run are failed", parse=_seconds)
    step_timeout: float = option(
        5.0,
        "seconds, beyond ten times what a step should take, after which it is late and the engine not ready",
        parse=_seconds,
    )
    health_port: int = option(
        0,
        "port that serves only health, in plaintext, for probes of an engine with TLS; 0: none",
        minimum=0,
        maximum=MAX_PORT,
    )
    disable_log_stats: bool = option(False, "log no line of throughput, load and cache use every 10 s")
    logs: LogOptions = option(LogOptions(), "logs")
    tls: TlsFiles | None = option(None, "TLS")
    config: EngineConfig = option(REQUIRED, "engine")

    def __post_init__(self) -> None:
        check_options(self)
        if self.tls is not None and self.tls.certificate is None:
            raise ValueError("--tls-ca needs --tls-cert and --tls-key")
        if self.tls is not None and self.tls.authority is None:
            if self.config.kv_tiers.kv_transfer_address is not None:
                raise ValueError(
                    "--kv-transfer-address with --tls-cert needs --tls-ca too: engines verify each other's certificates"
                )
            if self.config.parallel.nnodes > 1:
                raise ValueError("--nnodes with --tls-cert needs --tls-ca too: nodes verify each other's certificates")

    @property
    def engine_config(self) -> EngineConfig:
        """`config`, with the TLS files for connections to other engines and between nodes."""
        files = self.tls
        if files is None or files.certificate is None or files.key is None or files.authority is None:
            return self.config
        paths = PeerTls(str(files.certificate), str(files.key), str(files.authority))
        return replace(self.config, peer_tls=paths)
