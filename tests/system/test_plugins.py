"""The package of examples/plugin, installed by pip beside Proa: two ranks serve its architecture in its quantization,
also with an adapter, and the gateway reads its tool format."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from support.adapters import ADAPTERS, merged, write_adapter
from support.greedy import greedy
from support.int8_rows import quantize_rows
from support.plugins import EXAMPLE
from support.processes import engine_process, gateway_process
from support.tiny_models import CHAT_TEMPLATE, make_tiny_model

MODEL, ADAPTER = "arcee", "adapted"
SOME = ADAPTERS[1]  # of projections of attention and of the feed-forward layer
TOOLS_TEMPLATE = "{% if tools %}Write =>call NAME ARGUMENTS for one of {{ tools | tojson }}{% endif %}"
PROMPT = "A proa is a boat with two unlike hulls"
NUM_TOKENS = 16
CITY = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": CITY, "strict": True}}


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, str]:
    """Of a program for which the package is installed."""
    folder = tmp_path_factory.mktemp("plugin")
    project, packages = folder / "project", folder / "packages"
    shutil.copytree(EXAMPLE, project, ignore=shutil.ignore_patterns("build", "__pycache__", "*.egg-info"))
    offline = ("--no-index", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *offline, "--target", str(packages), str(project)], check=True
    )
    return {"PYTHONPATH": str(packages)}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the values that the weights in `quantized` stand for."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "dense", "arcee", seed=3)


@pytest.fixture(scope="module")
def quantized(dense: Path) -> Path:
    folder = quantize_rows(dense, dense.with_name("quantized"))
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"chat_template": TOOLS_TEMPLATE + CHAT_TEMPLATE}))
    return folder


@pytest.fixture(scope="module")
def adapter(dense: Path, quantized: Path) -> Path:
    """Of the weights in `dense`, as `quantized` has left them."""
    return write_adapter(dense, dense.with_name("adapter"), SOME)


@pytest.fixture(scope="module")
def client(environment: Mapping[str, str], quantized: Path, adapter: Path) -> Iterator[OpenAI]:
    arguments = (f"--model={quantized}", f"--served-model-name={MODEL}", "--tensor-parallel-size=2")
    adapters = ("--enable-lora", "--lora-modules", f"{ADAPTER}={adapter}")
    with (
        engine_process(*arguments, *adapters, env=environment) as (_, address),
        gateway_process(address, "--reasoning-parser=thoughts", env=environment) as (_, port),
        OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0) as client,
    ):
        yield client


def test_tokens_are_those_of_transformers(client: OpenAI, dense: Path) -> None:
    check_tokens(client, MODEL, dense)


def test_an_adapter_has_the_tokens_of_the_merged_weights(client: OpenAI, dense: Path, adapter: Path) -> None:
    folder = dense.with_name("merged")
    merged(dense, adapter, SOME).save_pretrained(folder)
    check_tokens(client, ADAPTER, folder)


def check_tokens(client: OpenAI, model: str, folder: Path) -> None:
    extra: Any = {"ignore_eos": True, "return_token_ids": True}
    completion: Any = client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=NUM_TOKENS, extra_body=extra
    )
    (expected,) = greedy(folder, [list(PROMPT.encode())], NUM_TOKENS)
    assert expected.num_sure >= NUM_TOKENS // 2
    assert completion.choices[0].token_ids[: expected.num_sure] == expected.token_ids[: expected.num_sure]


def test_a_call_in_the_packages_format_is_constrained_and_read(client: OpenAI) -> None:
    question: Any = [{"role": "user", "content": "What is the weather in Rome?"}]
    tools: Any = [WEATHER]
    completion: Any = client.chat.completions.create(
        model=MODEL,
        messages=question,
        tools=tools,
        tool_choice="required",
        max_tokens=100,
        parallel_tool_calls=False,
        logit_bias={str(ord("=")): 100},  # a call at once: a random model may write thoughts to the end
    )
    (call,) = completion.choices[0].message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == ("weather", {"city": "Rome"})


def test_collect_env_names_the_package_and_what_it_adds(environment: Mapping[str, str]) -> None:
    printed = subprocess.run(
        [sys.executable, "-m", "proa_cli", "collect-env"],
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert (
        "Plugins\n-------\nproa-example 1.0.0: architecture ArceeForCausalLM, quantization int8_rows, "
        "tool format arrow, reasoning format thoughts\n"
    ) in printed


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--tool-call-parser=arow",), "unknown tool format 'arow'; there are arrow, harmony"),
        (("--reasoning-parser=arrow",), "unknown reasoning format 'arrow'; there are thoughts, deepseek_r1"),
    ],
)
def test_an_unknown_format_is_answered_with_those_of_the_package(
    flags: tuple[str, ...], message: str, environment: Mapping[str, str]
) -> None:
    command = [sys.executable, "-m", "proa_gateway", "serve", "--engine=127.0.0.1:1", *flags]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert message in done.stderr
