"""`RemoteOpenAIServer` as vLLM's server tests use it: an engine and a gateway of Proa."""

import json
import os
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import anthropic
import httpx
import openai
from peers.metrics import JoinedPages
from peers.model import Kind, folder_of

from support.processes import free_port

START_SECONDS = 120.0
# vLLM's options that Proa has too, by their number of values. All others do not matter here: the gateway chooses the
# format of tool calls and reasoning by the model's chat template.
ENGINE_OPTIONS = {
    "--max-num-seqs": 1,
    "--max-logprobs": 1,
    "--no-enable-prefix-caching": 0,
    "--no-async-scheduling": 0,
    "--enable-lora": 0,
    "--max-loras": 1,
    "--max-lora-rank": 1,
    "--pooler-config": 1,
}
GATEWAY_OPTIONS = {
    "--allowed-origins": 1,
    "--root-path": 1,
    "--trust-request-chat-template": 0,
    "--chat-template": 1,
    "--chat-template-content-format": 1,
    "--enable-force-include-usage": 0,
    "--enable-per-request-metrics": 0,
    "--return-tokens-as-token-ids": 0,
    "--enable-tokenizer-info-endpoint": 0,
    "--lora-modules": 1,
}
# Options of tests whose answers run for a while, or are as long as max_tokens.
RUNS_ON = {"--enable-chunked-prefill", "--no-enable-prefix-caching", "--enable-server-load-tracking"}
# `--max-model-len` up to here, which tests fill, and from there, which they read. Those between save memory, and the
# built-in model's tokenizer makes more tokens of a text than those of the models that the tests name.
SHORT_CONTEXT, LONG_CONTEXT = 1000, 8192
TOKEN_RATIO = 2  # so many more tokens, about


class RemoteOpenAIServer:
    """A running Proa that serves `model.folder_of(model)` under the test's model name. A context manager."""

    DUMMY_API_KEY = "token-abc123"
    show_hidden_metrics = False

    def __init__(
        self,
        model: str,
        vllm_serve_args: list[str],
        env_dict: Mapping[str, str] | None = None,
        port: int | None = None,
        **unused: object,
    ) -> None:
        arguments = _split(vllm_serve_args)
        if "reward" in os.fspath(model):  # such a model has a value of each token
            arguments += ["--pooler-config", json.dumps({"task": "token_classify"})]
        name = _values(arguments, "--served-model-name") or [os.fspath(model)]
        keys = _values(arguments, "--api-key") or [key for key in [(env_dict or {}).get("VLLM_API_KEY")] if key]
        self.host, self.port = "127.0.0.1", port or free_port()
        engine_port, metrics_port = free_port(), free_port()
        folder = folder_of(os.fspath(model), _kind(os.fspath(model), arguments))
        listen = ["--host", self.host, "--port"]
        self._processes = [
            _start("proa-engine", *listen, str(engine_port), "--metrics-port", str(metrics_port),
                   "--model", str(folder), "--served-model-name", name[0],
                   *_known(arguments, ENGINE_OPTIONS), *_context(arguments)),
            _start("proa-gateway", *listen, str(self.port), "--engine", f"{self.host}:{engine_port}",
                   *_known(arguments, GATEWAY_OPTIONS), *_key_file(keys), *_lora_updates(env_dict or {})),
        ]  # fmt: skip
        # A Prometheus scrapes both, and the engine's counts steps and waiting requests that the gateway does not know.
        self._metrics = JoinedPages([f"{self.url_root}/metrics", f"http://{self.host}:{metrics_port}/metrics"])
        try:
            self._wait_until_ready()
        except BaseException:
            self._stop()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop()

    @property
    def url_root(self) -> str:
        return f"http://{self.host}:{self.port}"

    def url_for(self, *parts: str) -> str:
        if parts == ("metrics",):
            return self._metrics.url
        return "/".join([self.url_root, *(part.strip("/") for part in parts if part)])

    def get_client(self, **options: Any) -> openai.OpenAI:
        return openai.OpenAI(**self._client_options("v1", options))

    def get_async_client(self, **options: Any) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(**self._client_options("v1", options))

    def get_client_anthropic(self, **options: Any) -> anthropic.Anthropic:
        return anthropic.Anthropic(**self._client_options("", options))

    def get_async_client_anthropic(self, **options: Any) -> anthropic.AsyncAnthropic:
        return anthropic.AsyncAnthropic(**self._client_options("", options))

    def _client_options(self, path: str, options: dict[str, Any]) -> dict[str, Any]:
        return {
            "base_url": self.url_for(path),
            "api_key": self.DUMMY_API_KEY,
            "max_retries": 0,
            "timeout": 60,
        } | options

    def _stop(self) -> None:
        self._metrics.close()
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            for process in self._processes:
                if process.poll() is not None:
                    raise RuntimeError(f"{process.args!r} exited with status {process.returncode}")
            try:
                if httpx.get(f"{self.url_root}/ready").status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.2)
        raise RuntimeError("the server did not become ready")


def _start(program: str, *arguments: str) -> "subprocess.Popen[bytes]":
    with Path(f"{program}.log").open("ab") as log:
        return subprocess.Popen([program, "serve", *arguments], stdout=log, stderr=subprocess.STDOUT)


def _split(options: list[str]) -> list[str]:
    """Each `--option=value` as two arguments, and `--option.field value` as `--option {"field": "value"}`."""
    parts = [part for option in options for part in (option.split("=", 1) if option.startswith("--") else [option])]
    for index, part in enumerate(parts[:-1]):
        if part.startswith("--") and "." in part:
            parts[index], field = part.split(".", 1)
            parts[index + 1] = json.dumps({field: parts[index + 1]})
        if part == "--pooler-config":
            config = json.loads(parts[index + 1])
            longest = {name: TOKEN_RATIO * config[name] for name in {"max_embed_len"} & {*config}}
            parts[index + 1] = json.dumps(config | longest)
    return parts


def _values(arguments: list[str], option: str) -> list[str]:
    return [arguments[index + 1] for index, argument in enumerate(arguments) if argument == option]


def _key_file(keys: list[str]) -> list[str]:
    """The gateway's option for these API keys, if there are any."""
    if not keys:
        return []
    path = Path("keys.json")
    path.write_text(json.dumps({"keys": [{"name": f"key-{number}", "key": key} for number, key in enumerate(keys)]}))
    return ["--api-keys", str(path)]


def _kind(name: str, arguments: list[str]) -> Kind:
    """How the answers of the model end that the tests are for."""
    if {"qwen3", "deepseek-r1"} & {*_values(arguments, "--reasoning-parser")}:
        return Kind.THINKS_ON if "--no-async-scheduling" in arguments else Kind.THINKS_FIRST
    if "--enable-prefix-caching" in arguments:  # tests of decisions
        return Kind.LABELS
    return Kind.RUNS_ON if "TinyLlama" in name or RUNS_ON & {*arguments} else Kind.ENDS


def _context(arguments: list[str]) -> list[str]:
    """The engine's options for the model's context."""
    lengths = _values(arguments, "--max-model-len")
    if "--reasoning-parser" not in arguments:
        lengths = [length for length in lengths if not SHORT_CONTEXT < int(length) < LONG_CONTEXT]
    return ["--max-model-len", lengths[-1]] if lengths else []


def _lora_updates(environment: Mapping[str, str]) -> list[str]:
    """The gateway's option for vLLM's variable."""
    return ["--enable-runtime-lora-updating"] if "VLLM_ALLOW_RUNTIME_LORA_UPDATING" in environment else []


def _known(arguments: list[str], options: dict[str, int]) -> list[str]:
    """Those of the arguments that are `options`, with their values."""
    known: list[str] = []
    for index, argument in enumerate(arguments):
        if argument in options:
            known += arguments[index : index + 1 + options[argument]]
    return known
