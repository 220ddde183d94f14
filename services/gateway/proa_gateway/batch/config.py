"""BatchConfig: the configuration of one batch. Each field is also a flag of `proa-gateway run-batch`."""

from dataclasses import dataclass
from pathlib import Path

from proa.logs import Level, LogOptions
from proa.options import REQUIRED, check_options, masked_repr, option
from proa_gateway.config import parse_address, parse_tokenizer_folder


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not a URL")
    return text


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchLogs(LogOptions):
    """The batch shows its progress itself."""

    log_level: Level = option("warning", "least severe level of the messages to log")


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchConfig:
    """Raises `ValueError` for a value out of range. `url` and `engines` exclude each other."""

    input_file: Path = option(
        REQUIRED, "requests, a JSON object a line: custom_id, method, url, body", short="-i", metavar="FILE"
    )
    output_file: Path = option(
        REQUIRED,
        "responses, appended as they come; a request whose custom_id is in it is not sent again",
        short="-o",
        metavar="FILE",
    )
    url: str | None = option(None, "URL of a gateway, without /v1", parse=_url, exclusive="gateway")
    engines: tuple[str, ...] = option(
        (),
        "address of an engine, for a gateway in this process; repeat for several",
        flag="--engine",
        metavar="HOST:PORT",
        parse=parse_address,
        exclusive="gateway",
    )
    tokenizer: Path | None = option(
        None,
        "with --engine: folder with the model's tokenizer (default: download it from the engine)",
        metavar="FOLDER",
        parse=parse_tokenizer_folder,
    )
    api_key: str | None = option(None, "API key of the gateway (default: the variable PROA_API_KEY)", metavar="KEY")
    max_concurrency: int = option(64, "limit of requests that are sent and not answered", minimum=1)
    logs: BatchLogs = option(BatchLogs(), "logs")

    __repr__ = masked_repr

    def __post_init__(self) -> None:
        check_options(self)
