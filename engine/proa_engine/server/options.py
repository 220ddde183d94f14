"""ServeOptions: what `proa-engine serve` is asked for, beside the engine's own configuration."""

from dataclasses import dataclass

from proa.tls import TlsFiles
from proa_engine.config import EngineConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeOptions:
    """Times in seconds; `metrics_port` 0: no metrics; `health_port` 0: health only beside the rest. `tls` None:
    plaintext."""

    config: EngineConfig
    host: str = "0.0.0.0"
    port: int = 50051
    metrics_port: int = 9400
    health_port: int = 0
    tls: TlsFiles | None = None
    drain_timeout: float = 60.0
    step_timeout: float = 5.0
