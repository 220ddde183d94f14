"""BenchServeOptions: the flags of `proa bench serve`, with the names of `vllm bench serve`, version 0.33."""

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from proa.addresses import host_and_port
from proa.options import check_options, option
from proa_cli.bench.arrivals import Burstiness, RampUp, Strategy
from proa_cli.bench.datasets import Lengths, Ratios
from proa_cli.bench.metrics import GOODPUT_LATENCIES, LATENCIES
from proa_cli.bench.session_options import SessionOptions

Backend = Literal["openai", "openai-chat", "vllm"]
Dataset = Literal["random", "sharegpt", "custom", "prefix_repetition", "sessions"]
ENDPOINTS: Mapping[str, str] = {
    "openai": "/v1/completions",
    "vllm": "/v1/completions",
    "openai-chat": "/v1/chat/completions",
}
SAMPLING = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
)
"""Fields of the request that have flags."""


def _url(text: str) -> str:
    if not text.startswith(("http://", "https://")):
        raise ValueError(f"{text!r} is not a URL that begins with http:// or https://")
    return text


def _number(text: str) -> float:
    """NaN if it is none."""
    try:
        return float(text)
    except ValueError:
        return math.nan


def _rate(text: str) -> float | None:
    rate = _number(text)
    if not rate > 0:
        raise ValueError(f"{text} is not a number of requests a second above zero, or inf")
    return None if rate == float("inf") else rate


def _burstiness(text: str) -> Burstiness:
    return Burstiness(float(text))


def _json_object(text: str) -> Mapping[str, Any]:
    parsed = json.loads(text)
    if not isinstance(parsed, Mapping):
        raise ValueError(f"{text} is not a JSON object")
    return parsed


def _ratios(text: str) -> Ratios:
    """A number for inputs and outputs, or an object with both."""
    parsed = json.loads(text)
    if isinstance(parsed, Mapping):
        return Ratios(float(parsed.get("input", 0.0)), float(parsed.get("output", 0.0)))
    return Ratios(float(parsed), float(parsed))


def _pair(text: str) -> tuple[str, str]:
    key, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text} is not KEY=VALUE")
    return key.strip(), value.strip()


def _limit(text: str) -> tuple[str, float]:
    name, _, value = text.partition(":")
    limit = _number(value)
    if name not in GOODPUT_LATENCIES or math.isnan(limit):
        raise ValueError(f"{text} is not NAME:MILLISECONDS with a name of {', '.join(GOODPUT_LATENCIES)}")
    return name, limit


def _names(text: str) -> tuple[str, ...]:
    names = tuple(text.split(","))
    if not set(names) <= LATENCIES.keys():
        raise ValueError(f"{text} is not a list, divided by commas, of {', '.join(LATENCIES)}")
    return names


def _percentages(text: str) -> tuple[float, ...]:
    values = tuple(_number(each) for each in text.split(","))
    if not all(0 <= each <= 100 for each in values):
        raise ValueError(f"{text} is not a list of percentages, divided by commas")
    return values


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """Which server is asked, and with which fields."""

    backend: Backend = option("openai", "`openai` and `vllm`: completions; `openai-chat`: chat completions")
    base_url: str | None = option(None, "the server's URL, in place of --host and --port", metavar="URL", parse=_url)
    host: str = option("127.0.0.1", "the server's address")
    port: int = option(8000, "the server's port", minimum=1, maximum=65535)
    endpoint: str | None = option(None, "path of the API (default: /v1/completions or /v1/chat/completions)")
    header: tuple[tuple[str, str], ...] = option((), "headers of each request", metavar="KEY=VALUE", parse=_pair)
    insecure: bool = option(False, "do not verify the certificate of an HTTPS server")
    model: str | None = option(None, "the model: name, folder or hub id (default: the first that the server lists)")
    served_model_name: str | None = option(None, "the model's name in the API, if it is not --model")
    lora_modules: tuple[str, ...] = option((), "names of adapters, one of which each request uses in place of --model")
    lora_assignment: Literal["random", "round-robin"] = option("random", "how an adapter is chosen")
    tokenizer: str | None = option(
        None,
        "folder or hub id of the tokenizer (default: that of --model if it is a folder, else the server's /tokenize)",
    )
    request_id_prefix: str | None = option(
        None, "of the header X-Request-Id, followed by the request's number (default: bench- and random digits)"
    )
    ignore_eos: bool = option(False, "generate as many tokens as asked for; always so with random prompts")
    logprobs: int | None = option(None, "log probabilities a token to ask for", minimum=0)
    temperature: float | None = option(None, "sampling temperature (default of these: the server's)", minimum=0)
    top_p: float | None = option(None, "probability mass to sample from")
    top_k: int | None = option(None, "tokens to sample from")
    min_p: float | None = option(None, "least probability relative to the likeliest token's")
    frequency_penalty: float | None = option(None, "penalty for a token by how often the output has it")
    presence_penalty: float | None = option(None, "penalty for a token that the output has")
    repetition_penalty: float | None = option(None, "factor for a token that prompt or output have")
    extra_body: Mapping[str, Any] | None = option(
        None, "fields of each request, as a JSON object", metavar="JSON", parse=_json_object
    )

    @property
    def url(self) -> str:
        return (self.base_url or f"http://{host_and_port(self.host, self.port)}").rstrip("/")

    @property
    def is_chat(self) -> bool:
        return self.backend == "openai-chat"

    @property
    def api_url(self) -> str:
        return self.url + (self.endpoint or ENDPOINTS[self.backend])


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetOptions:
    """Which prompts are sent, and how long outputs are."""

    dataset_name: Dataset = option(
        "random",
        "`random`: random tokens; `prefix_repetition`: such with shared prefixes; `sharegpt`: a JSON file of "
        "conversations; `custom`: a JSONL file of prompts; `sessions`: conversations of many turns, as of agents",
    )
    dataset_path: Path | None = option(None, "file of sharegpt or custom", metavar="FILE", parse=Path)
    num_prompts: int = option(1000, "number of requests; of sessions: turns of all together", minimum=1)
    seed: int = option(0, "of prompts, arrival times and adapters", minimum=0)
    disable_shuffle: bool = option(False, "take the prompts of a file in its order")
    oversample: bool = option(True, "repeat random prompts of a file that has too few; without it fewer are sent")
    skip_chat_template: bool = option(False, "send the prompts of custom as they are; always so to chat completions")
    input_len: int | None = option(None, "as --random-input-len", minimum=1)
    output_len: int | None = option(None, "output tokens of any dataset", minimum=1)
    random_input_len: int = option(1024, "tokens of a random prompt", minimum=0)
    random_output_len: int = option(128, "output tokens of a random prompt", minimum=1)
    random_range_ratio: Ratios = option(
        Ratios(),
        "lengths are drawn evenly from LEN * (1 - RATIO) to LEN * (1 + RATIO); a number, or as JSON "
        '{"input": RATIO, "output": RATIO}',
        metavar="RATIO",
        parse=_ratios,
    )
    random_prefix_len: int = option(0, "tokens before a random prompt, the same in all", minimum=0)
    prefix_repetition_prefix_len: int = option(256, "tokens of a shared prefix", minimum=1)
    prefix_repetition_suffix_len: int = option(256, "tokens behind a shared prefix", minimum=1)
    prefix_repetition_num_prefixes: int = option(10, "number of shared prefixes", minimum=1)
    prefix_repetition_output_len: int = option(128, "output tokens", minimum=1)
    sharegpt_output_len: int | None = option(None, "output tokens (default: as long as the file's answer)", minimum=1)
    custom_output_len: int = option(256, "output tokens; -1: `output_tokens` of each line", minimum=-1)

    def __post_init__(self) -> None:
        check_options(self)
        is_file = self.dataset_name in ("sharegpt", "custom")
        if is_file and self.dataset_path is None:
            raise ValueError(f"--dataset-name {self.dataset_name} needs --dataset-path")
        if not is_file and self.dataset_path is not None:
            raise ValueError(f"--dataset-path needs --dataset-name sharegpt or custom, not {self.dataset_name}")

    @property
    def lengths(self) -> Lengths:
        return Lengths(
            inputs=self.input_len or self.random_input_len,
            outputs=self.output_len or self.random_output_len,
            ratios=self.random_range_ratio,
            prefix=self.random_prefix_len,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadOptions:
    """When requests are sent."""

    request_rate: float | None = option(
        None, "requests a second (default: inf, all at the start)", metavar="RATE", parse=_rate
    )
    burstiness: Burstiness = option(
        Burstiness(),
        "shape of the gamma distribution of the times between requests: 1 is a Poisson process, less is burstier, inf "
        "is even",
        metavar="SHAPE",
        parse=_burstiness,
    )
    ramp_up_strategy: Strategy | None = option(None, "how the rate grows, in place of --request-rate")
    ramp_up_start_rps: float | None = option(None, "requests a second at the start of a ramp-up", minimum=0)
    ramp_up_end_rps: float | None = option(None, "requests a second at the end of a ramp-up", minimum=0)
    max_concurrency: int | None = option(None, "most requests at once (default: no limit)", minimum=1)
    num_warmups: int = option(0, "requests before the measured ones", minimum=0)
    ready_check_timeout_sec: float = option(0.0, "seconds to wait until a first request succeeds", minimum=0)
    max_seconds: float = option(6 * 3600.0, "time limit; requests that still run then are not counted", minimum=1)

    def __post_init__(self) -> None:
        check_options(self)
        _ = self.ramp_up  # checks its flags

    @property
    def ramp_up(self) -> RampUp | None:
        if self.ramp_up_strategy is None:
            return None
        if self.request_rate is not None:
            raise ValueError("--ramp-up-strategy takes the place of --request-rate: give one of the two")
        if self.ramp_up_start_rps is None or self.ramp_up_end_rps is None:
            raise ValueError("--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps")
        return RampUp(self.ramp_up_strategy, self.ramp_up_start_rps, self.ramp_up_end_rps)


@dataclass(frozen=True, slots=True, kw_only=True)
class ResultOptions:
    """What is shown and saved."""

    percentile_metrics: Sequence[str] | None = option(
        None,
        f"latencies to show, divided by commas, of {', '.join(LATENCIES)} (default: ttft,tpot,itl)",
        metavar="NAMES",
        parse=_names,
    )
    metric_percentiles: Sequence[float] = option(
        (99.0,), "percentiles, divided by commas", metavar="PERCENTAGES", parse=_percentages
    )
    goodput: tuple[tuple[str, float], ...] = option(
        (),
        f"limits that a request must keep to be good: of {', '.join(GOODPUT_LATENCIES)}",
        metavar="NAME:MILLISECONDS",
        parse=_limit,
    )
    disable_tqdm: bool = option(False, "show no progress; so too where the output for errors is no terminal")
    save_result: bool = option(False, "write the results to a JSON file")
    save_detailed: bool = option(False, "with a list of the figures and texts of all requests")
    append_result: bool = option(False, "write the results behind those that the file has")
    result_dir: Path = option(Path("."), "folder of the file", metavar="FOLDER", parse=Path)
    result_filename: str | None = option(None, "name of the file (default: made of label, rate, model and time)")
    label: str | None = option(None, "of the results (default in the file's name: the backend)")
    metadata: tuple[tuple[str, str], ...] = option(
        (), "fields to write with the results", metavar="KEY=VALUE", parse=_pair
    )

    @property
    def is_saved(self) -> bool:
        return self.save_result or self.append_result

    @property
    def shown(self) -> Sequence[str]:
        return self.percentile_metrics or ("ttft", "tpot", "itl")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchServeOptions:
    """Raises `ValueError` for a value out of range, and for flags that do not go together."""

    server: ServerOptions = option(ServerOptions(), "server")
    dataset: DatasetOptions = option(DatasetOptions(), "prompts")
    sessions: SessionOptions = option(SessionOptions(), "sessions")
    load: LoadOptions = option(LoadOptions(), "load")
    results: ResultOptions = option(ResultOptions(), "results")
