"""`proa chat` and `proa complete` against a server whose responses are scripted."""

import io
import json
import re
import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from proa_cli import http_api
from proa_cli.main import main

MODELS = {"data": [{"id": "first"}, {"id": "second"}]}
DONE = "data: [DONE]\n\n"


class Server(ThreadingHTTPServer):
    """`responses`: status and body of the POSTs, in their order. `requests`: path, authorization and body of each."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.responses: list[tuple[int, str]] = []
        self.requests: list[tuple[str, str | None, dict[str, Any]]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        is_known = self.path == "/v1/models"
        self.answer(200 if is_known else 404, json.dumps(MODELS) if is_known else '{"detail": "Not Found"}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.requests.append((self.path, self.headers["authorization"], body))
        self.answer(*self.server.responses.pop(0))

    def answer(self, status: int, body: str) -> None:
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    for name in ("PROA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def events(*deltas: dict[str, Any], finish_reason: str = "stop", **fields: Any) -> str:
    """A chat's stream."""
    choices: list[dict[str, Any]] = [{"delta": delta, "finish_reason": None} for delta in deltas]
    choices[-1]["finish_reason"] = finish_reason
    return "".join(f"data: {json.dumps({'choices': [choice], **fields})}\n\n" for choice in choices)


def chat(server: Server, *words: str) -> int:
    return main(["chat", f"--url={server.url}", *words])


def test_an_answer_goes_to_the_output_and_reasoning_beside_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    parts: list[dict[str, Any]] = [{"role": "assistant"}, {"reasoning": "Hm"}, {"reasoning": "!"}, {"content": "Pa"}]
    server.responses = [(200, events(*parts, {"content": "ris."}) + DONE)]
    assert chat(server, "--quick=What?", "--system=Be brief.") == 0
    assert capsys.readouterr() == ("Paris.\n", "[reasoning]\nHm!\n[answer]\n")
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
    assert server.requests == [("/v1/chat/completions", None, {"model": "first", "messages": messages, "stream": True})]


def test_a_pipe_is_one_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("two\nlines\n"))
    server.responses = [(200, events({"content": "Yes.\n"}) + DONE)]
    assert chat(server, "--model-name=second") == 0
    assert capsys.readouterr().out == "Yes.\n"
    ((_, _, body),) = server.requests
    assert body["model"] == "second"
    assert body["messages"] == [{"role": "user", "content": "two\nlines"}]


@pytest.mark.parametrize(
    ("flags", "variables", "sent"),
    [
        ((), {"OPENAI_API_KEY": "openai"}, "openai"),
        ((), {"OPENAI_API_KEY": "openai", "PROA_API_KEY": "proa"}, "proa"),
        (("--api-key=flag",), {"PROA_API_KEY": "proa"}, "flag"),
    ],
)
def test_the_key_is_of_the_flag_or_the_environment(
    flags: tuple[str, ...], variables: dict[str, str], sent: str, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    server.responses = [(200, events({"content": "Yes."}) + DONE)]
    assert chat(server, "-q", "hi", *flags) == 0
    assert server.requests[0][1] == f"Bearer {sent}"


@pytest.mark.parametrize(
    ("response", "reason"),
    [
        ((400, '{"error": {"message": "top_p: too\\n large"}}'), "top_p: too large (status 400)"),
        ((502, "<html>"), "Bad Gateway (status 502)"),
        ((401, '{"error": {"message": "No."}}'), "No. (status 401; give the key with --api-key or PROA_API_KEY)"),
        (
            (200, events({"content": "Yes"}) + 'data: {"error": {"message": "The engine is lost."}}\n\n'),
            "The engine is",
        ),
        ((200, events({"content": "Yes"})), "broke off before the end of the answer"),
        ((200, "data: <html>\n\n"), "does not answer with events in JSON"),
    ],
)
def test_a_failure_is_one_line(
    response: tuple[int, str], reason: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    server.responses = [response]
    assert chat(server, "-q", "hi") == 1
    printed = capsys.readouterr().err
    assert printed.startswith("proa: error: ")
    assert printed.count("\n") == 1
    assert reason in printed


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:8000", "'localhost:8000' is not a URL that begins with http:// or https://"),
        ("http://127.0.0.1:9/v1", "cannot reach http://127.0.0.1:9/v1: Connection refused"),
    ],
)
def test_a_wrong_address_is_named(url: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", "--url", url, "-q", "hi"]) == 1
    assert capsys.readouterr().err == f"proa: error: {reason}\n"


def test_an_empty_pipe_is_refused(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n"))
    assert chat(server) == 1
    assert capsys.readouterr().err == "proa: error: the standard input has no message\n"
    assert not server.requests


def test_a_server_that_does_not_list_its_models_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(http_api, "_LIST_TIMEOUT", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert main(["chat", f"--url={url}/v1", "-q", "hi"]) == 1
    assert capsys.readouterr().err == f"proa: error: cannot reach {url}/v1: timed out\n"


def test_a_key_that_no_header_can_have_is_refused_without_it(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    for key in ("sk-secret\n", "sk-sécret"):
        assert chat(server, "-q", "hi", "--api-key", key) == 1
        printed = capsys.readouterr().err
        assert printed.startswith("proa: error: the API key has characters other than printable ASCII")
        assert "sk-" not in printed
    assert not server.requests


def test_an_address_without_v1_is_guessed(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["chat", f"--url={server.url.removesuffix('/v1')}", "-q", "hi"]) == 1
    assert capsys.readouterr().err == "proa: error: Not Found (status 404; does the URL end with /v1?)\n"


def test_an_answer_that_is_cut_off_says_so_and_statistics_follow(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    usage = f"data: {json.dumps({'choices': [], 'usage': {'completion_tokens': 7}})}\n\n"
    server.responses = [(200, events({"content": "Once"}, finish_reason="length") + usage + DONE)]
    assert chat(server, "-q", "hi", "--stats") == 0
    cut, stats = capsys.readouterr().err.splitlines()
    assert cut == "proa: the answer was cut off at the limit of its length"
    assert re.fullmatch(r"proa: 7 tokens in [\d.]+ s, [\d.]+ tokens/s, first after [\d.]+ s", stats)
    assert server.requests[0][2]["stream_options"] == {"include_usage": True}


def test_a_prompt_is_continued(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    texts = ({"choices": [{"text": text}]} for text in (" Pa", "ris."))
    server.responses = [(200, "".join(f"data: {json.dumps(each)}\n\n" for each in texts) + DONE)]
    assert main(["complete", f"--url={server.url}", "-q", "The capital is", "--max-tokens=4"]) == 0
    assert capsys.readouterr().out == " Paris.\n"
    body = {"model": "first", "prompt": "The capital is", "max_tokens": 4, "stream": True}
    assert server.requests == [("/v1/completions", None, body)]


class Typed(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_typed_questions_are_a_conversation_from_which_failures_are_left_out(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", Typed("one\n\ntwo\nthree\n"))
    failed = (500, '{"error": {"message": "No."}}')
    server.responses = [(200, events({"content": "1"}) + DONE), failed, (200, events({"content": "3"}) + DONE)]
    assert chat(server) == 0
    printed = capsys.readouterr()
    assert printed.err.splitlines()[1:] == ["proa: error: No. (status 500)"]
    messages = server.requests[-1][2]["messages"]
    assert [each["content"] for each in messages] == ["one", "1", "three"]


def typed(
    text: str, server: Server, monkeypatch: pytest.MonkeyPatch, *words: str, command: str = "chat"
) -> list[dict[str, Any]]:
    """The bodies of the requests, each of which gets an answer."""
    monkeypatch.setattr("sys.stdin", Typed(text))
    answer = {"choices": [{"delta": {"content": "Yes."}, "text": "Yes.", "finish_reason": "stop"}]}
    server.responses = [(200, f"data: {json.dumps(answer)}\n\n" + DONE)] * 9
    assert main([command, f"--url={server.url}", *words]) == 0
    return [{**body, "stream": None} for _, _, body in server.requests]


def chat_body(*messages: str, system: str | None = None, **fields: Any) -> dict[str, Any]:
    roles = ("user", "assistant")
    first = [] if system is None else [{"role": "system", "content": system}]
    said = [{"role": roles[i % 2], "content": text} for i, text in enumerate(messages)]
    return {"model": "first", "stream": None, **fields, "messages": first + said}


def test_flags_are_fields_of_each_request_until_a_command_sets_them(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = (
        "one",
        "/set temperature 1",
        "/set max-tokens",
        '/set stop ["a", "b"]',
        "/set system Be long,  please.",
        "/set model second",
        "two",
        "/set system",
        "/set stop END",
        "three",
    )
    flags = ("--temperature=0", "--max-tokens=5", "--system=Be brief.")
    assert typed("\n".join(lines), server, monkeypatch, *flags) == [
        chat_body("one", system="Be brief.", temperature=0, max_tokens=5),
        chat_body("one", "Yes.", "two", system="Be long,  please.", temperature=1, stop=["a", "b"], model="second"),
        chat_body("one", "Yes.", "two", "Yes.", "three", temperature=1, stop="END", model="second"),
    ]


def test_a_conversation_is_cleared_and_settings_stay(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    bodies = typed("one\n/clear\ntwo\n/bye\nthree", server, monkeypatch, "--system=Be brief.")
    assert bodies == [chat_body("one", system="Be brief."), chat_body("two", system="Be brief.")]


def test_quotes_hold_several_lines_and_what_looks_like_a_command(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = '''"""/help
 me

 out"""
/clear
"""
one line
"""
/clear
/set system """a
b"""
/etc/hosts has what?'''
    assert typed(text, server, monkeypatch) == [
        chat_body("/help\n me\n\n out"),
        chat_body("one line"),
        chat_body("/etc/hosts has what?", system="a\nb"),
    ]


def test_commands_are_never_sent_and_what_is_wrong_with_them_is_said(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "/help\n/nothing\n/set heat 1\n/set temperature hot\n/set stop [1\n/set model\n/set\n/clear\n"
    assert typed(text, server, monkeypatch, "--temperature=0.5") == []
    printed = capsys.readouterr().err
    for part in (
        "/set NAME VALUE",
        "names: model, temperature, max_tokens",
        "proa: error: there is no command /nothing; /help lists all",
        "proa: error: there is no setting heat, but model, temperature",
        "proa: error: hot is not a value of temperature",
        "proa: error: [1 is not a value of stop",
        "proa: error: name a model behind `/set model`",
        "\nmodel first\ntemperature 0.5\n",
    ):
        assert part in printed, printed


def test_prompts_have_settings_too_but_no_system_message(
    server: Server, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bodies = typed("/set seed 7\n/set system a\none", server, monkeypatch, "--temperature=0", command="complete")
    assert bodies == [{"model": "first", "prompt": "one", "temperature": 0, "seed": 7, "stream": None}]
    assert "there is no setting system" in capsys.readouterr().err
