"""Fuzz test: no request body gets a 5xx response or stops the gateway.

The gateway runs in its own process, with a fake engine. Bodies are generated from the gateway's OpenAPI (valid and
invalid ones), from known fields with arbitrary values, and from bytes.
"""

import json
import subprocess
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from schemathesis.generation import GenerationMode

from proa_gateway.app import create_app
from proa_gateway.config import GatewayConfig
from support.fake_engine import CHAT_TEMPLATE
from support.minimal_bodies import ALIASES, MINIMAL
from support.processes import fake_engine_process, gateway_process

DOCUMENT = create_app(GatewayConfig(engines=("engine:1",), enable_runtime_lora_updating=True)).openapi()
ROUTES = sorted(path for path, methods in DOCUMENT["paths"].items() if "requestBody" in methods.get("post", ()))
CONTENTS = {route: DOCUMENT["paths"][route]["post"]["requestBody"]["content"] for route in ROUTES}
JSON_ROUTES = [route for route in ROUTES if "application/json" in CONTENTS[route]]
FORM_ROUTES = [route for route in ROUTES if "multipart/form-data" in CONTENTS[route]]
CHAT = "/v1/chat/completions"
POOLING = (
    "--pooling-tasks",
    *(f"POOLING_TASK_{name}" for name in ("EMBED", "TOKEN_EMBED", "CLASSIFY", "TOKEN_CLASSIFY", "TOKEN_LOGPROBS")),
)
FLAGS = ("--enable-runtime-lora-updating", "--access-log", "--tool-call-parser=hermes", "--chat-template")
TEMPLATE = "{{ tools | tojson if tools }}" + CHAT_TEMPLATE


def nested(depth: int, *, objects: bool) -> Any:
    value: Any = "x"
    for _ in range(depth):
        value = {"a": value} if objects else [value]
    return value


NAMES = st.text(max_size=8) | st.sampled_from(["\ud800", "\udfff", "type", "properties"])
ANYTHING: SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(st.characters(), max_size=20)
    | st.sampled_from(
        ["", "fake", "\ud800", "\x00", "user", "assistant", "😀" * 9, 0, 1, -1, 2**31, 2**32, 2**64, -(2**70), 1e308]
    )
    | st.builds(nested, st.sampled_from([90, 260, 600]), objects=st.booleans()),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=4),
    max_leaves=8,
)
MESSAGES = st.lists(st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "x"]), "content": ANYTHING}))


def fields_of(schema: dict[str, Any]) -> Iterator[str]:
    """The properties of a body, and those of objects in them."""
    if reference := schema.get("$ref"):
        yield from fields_of(DOCUMENT["components"]["schemas"][reference.rpartition("/")[2]])
    for option in schema.get("anyOf", ()):
        yield from fields_of(option)
    yield from schema.get("properties", ())


def bodies(route: str) -> SearchStrategy[Any]:
    """The text and up to three other fields of the route, with any values."""
    schema = CONTENTS[route]["application/json"]["schema"]
    minimal = MINIMAL[ALIASES.get(route, route)]
    name, text = next(iter(minimal.items()))
    return st.builds(
        lambda base, changes: {**minimal, **base, **changes},
        st.fixed_dictionaries({name: (MESSAGES if name == "messages" else st.just(text)) | ANYTHING}),
        st.dictionaries(st.sampled_from([*sorted(set(fields_of(schema))), "unknown"]), ANYTHING, max_size=3),
    )


TEMPLATED = st.builds(
    lambda note, variables: {
        "messages": [{"role": "user", "content": "Hi", "note": note}],
        "chat_template_kwargs": variables,
    },
    ANYTHING,
    st.dictionaries(
        st.sampled_from(["opening", "self", "messages", "add_generation_prompt", "eos_token", "loop", "message"]),
        ANYTHING,
        max_size=3,
    ),
)

FUNCTIONS: dict[str, Callable[[Any], dict[str, Any]]] = {
    CHAT: lambda schema: {"type": "function", "function": {"name": "f", "parameters": schema}},
    "/v1/responses": lambda schema: {"type": "function", "name": "f", "parameters": schema},
    "/v1/messages": lambda schema: {"name": "f", "input_schema": schema},
}
"""A tool with this schema, by route."""

bounded = settings(
    max_examples=30,
    deadline=None,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=list(HealthCheck),
)


class Target:
    """The running gateway, and checks of its responses."""

    def __init__(self, process: subprocess.Popen[bytes], port: int) -> None:
        self.process = process
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=20)
        paths = self.client.get("/openapi.json").json()["paths"]
        self.documented = {route: set(paths[route]["post"]["responses"]) for route in ROUTES}

    def post(self, route: str, body: bytes) -> None:
        self.check(route, self.client.post(route, content=body, headers={"content-type": "application/json"}))

    def check(self, route: str, answer: Any) -> None:
        assert answer.status_code < 500, answer.text
        assert str(answer.status_code) in self.documented[route]
        assert self.process.poll() is None
        if answer.status_code >= 400:
            assert answer.json()["error"]["message"]
        elif answer.text.startswith(("data: ", "event: ")):
            assert "server_error" not in answer.text
            assert "api_error" not in answer.text
            assert answer.text.startswith("event: ") or answer.text.endswith("data: [DONE]\n\n")


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    with (
        fake_engine_process("--text", "Some words.", "--max-loras", "4", *POOLING) as (_, engine),
        gateway_process(engine, *FLAGS, TEMPLATE) as (process, port),
    ):
        target = Target(process, port)
        yield target
        assert target.client.get("/health").status_code == 200
        target.client.close()


@pytest.fixture(scope="module")
def schema(target: Target) -> Any:
    return schemathesis.openapi.from_url(f"{target.url}/openapi.json")


@pytest.mark.parametrize("mode", list(GenerationMode))
@pytest.mark.parametrize("route", ROUTES)
def test_bodies_generated_from_the_openapi_get_a_response(
    target: Target, schema: Any, route: str, mode: GenerationMode
) -> None:
    operation = schema[route]["POST"]

    @seed(1)
    @bounded
    @given(operation.as_strategy(generation_mode=mode))
    def answered(case: Any) -> None:
        target.check(route, case.call(timeout=20))

    answered()


@pytest.mark.parametrize("route", JSON_ROUTES)
def test_known_fields_with_arbitrary_values_get_a_response(target: Target, route: str) -> None:
    @seed(1)
    @bounded
    @given(bodies(route))
    def answered(body: dict[str, Any]) -> None:
        target.post(route, json.dumps(body).encode())

    answered()


@pytest.mark.parametrize("route", FORM_ROUTES)
def test_known_fields_of_forms_with_arbitrary_texts_get_a_response(target: Target, route: str) -> None:
    names = sorted(CONTENTS[route]["multipart/form-data"]["schema"]["properties"])
    texts = st.text(max_size=8) | st.sampled_from(["", "true", "0", "-1", "1e400", "en", "srt", "[]", "\x00"])

    @seed(1)
    @bounded
    @given(st.dictionaries(st.sampled_from(names) | st.text(max_size=4), texts, max_size=4), st.binary(max_size=64))
    def answered(fields: dict[str, str], file: bytes) -> None:
        target.check(route, target.client.post(route, data=fields, files={"file": file}))

    answered()


@pytest.mark.parametrize("route", FORM_ROUTES)
def test_bytes_that_are_no_form_get_a_response(target: Target, route: str) -> None:
    start = b'--b\r\nContent-Disposition: form-data; name="file"\r\n\r\n'
    headers = {"content-type": "multipart/form-data; boundary=b"}

    @seed(1)
    @bounded
    @given(st.lists(st.sampled_from([start, b"\r\n--b", b"--\r\n", b"--b--"]) | st.binary(max_size=16), max_size=8))
    def answered(parts: list[bytes]) -> None:
        target.check(route, target.client.post(route, content=b"".join(parts), headers=headers))

    answered()


def test_arbitrary_values_in_the_chat_template_get_a_response(target: Target) -> None:
    @seed(1)
    @bounded
    @given(TEMPLATED)
    def answered(body: dict[str, Any]) -> None:
        target.post(CHAT, json.dumps(body).encode())

    answered()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("route", FUNCTIONS)
def test_arbitrary_schemas_of_tools_get_a_response(target: Target, route: str, stream: bool) -> None:
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 5}
    fields = {"model": "fake", "stream": stream, **({"input": "Hi"} if route == "/v1/responses" else chat)}

    @seed(1)
    @bounded
    @given(st.dictionaries(NAMES, ANYTHING, max_size=3))
    def answered(schema: dict[str, Any]) -> None:
        target.post(route, json.dumps({**fields, "tools": [FUNCTIONS[route](schema)]}).encode())

    answered()


@pytest.mark.parametrize("route", ROUTES)
def test_bytes_that_are_not_json_get_a_response(target: Target, route: str) -> None:
    @seed(1)
    @bounded
    @given(st.binary(max_size=64) | st.text().map(str.encode) | ANYTHING.map(json.dumps).map(str.encode))
    def answered(body: bytes) -> None:
        target.post(route, body)

    answered()


def test_deeply_nested_bodies_get_a_response(target: Target) -> None:
    for depth in (100, 2_000, 200_000):
        target.post(CHAT, b'{"messages": ' + b"[" * depth + b"]" * depth + b"}")
        target.post(CHAT, b'{"messages": ' + b'{"a": ' * depth + b"1" + b"}" * depth + b"}")
