"""`proa bench serve` against a server whose responses are scripted: what a sample has, how requests are sent, and what
is printed and saved."""

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from proa_cli.bench import serve
from proa_cli.bench.client import Call, Sample, open_session, send
from proa_cli.bench.load import Load, Measured, run_load
from proa_cli.bench.options import DatasetOptions
from proa_cli.bench.prompts import make_prompts
from proa_cli.bench.tokens import find_tokenizer
from proa_cli.main import main

USAGE = {"prompt_tokens": 7, "completion_tokens": 5}
DONE = b"data: [DONE]\n\n"
ROLE = {"choices": [{"delta": {"role": "assistant", "content": ""}, "finish_reason": None}]}


def event(fields: Mapping[str, Any]) -> bytes:
    return f"data: {json.dumps(fields)}\n\n".encode()


def delta(finish_reason: str | None = None, **fields: str) -> bytes:
    return event({"choices": [{"delta": fields, "finish_reason": finish_reason}]})


def text(text: str, finish_reason: str | None = None) -> bytes:
    return event({"choices": [{"text": text, "finish_reason": finish_reason}]})


WHOLE = text("One") + text(" two", "length") + event({"choices": [], "usage": USAGE}) + DONE

Handler = Callable[["Request"], Awaitable[tuple[int, bytes]]]


@dataclass(frozen=True)
class Request:
    path: str
    headers: Mapping[str, str]
    body: Any


@dataclass
class Server:
    """`handler` returns the status and the body of a response. `requests`: all that came."""

    handler: Handler
    port: int = 0
    requests: list[Request] = field(default_factory=list)
    answering: set["asyncio.Task[None]"] = field(default_factory=set)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.answering.add(asyncio.create_task(self.answer(reader, writer)))

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer):
            await self.respond(reader, writer)

    async def respond(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in lines)}
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        request = Request(first.split()[1], headers, json.loads(body) if body else None)
        self.requests.append(request)
        status, answer = await self.handler(request)
        writer.write(f"HTTP/1.1 {status} -\r\nContent-Length: {len(answer)}\r\nConnection: close\r\n\r\n".encode())
        writer.write(answer)


@asynccontextmanager
async def serving(handler: Handler) -> AsyncIterator[Server]:
    server = Server(handler)
    listener = await asyncio.start_server(server.accept, "127.0.0.1", 0)
    server.port = listener.sockets[0].getsockname()[1]
    try:
        yield server
    finally:
        listener.close()
        for task in server.answering:
            task.cancel()
        await asyncio.gather(*server.answering, return_exceptions=True)


def always(answer: bytes, status: int = 200) -> Handler:
    async def handler(request: Request) -> tuple[int, bytes]:
        return status, answer

    return handler


async def sample_of(answer: bytes, status: int = 200) -> Sample:
    async with serving(always(answer, status)) as server, open_session(server.url) as session:
        return await send(session, Call(f"{server.url}/v1/completions", b"{}", {}, 3))


async def test_tokens_are_those_of_the_usage_and_chunks_are_events_with_tokens() -> None:
    sample = await sample_of(WHOLE)
    assert (sample.error, sample.text, sample.chunks, len(sample.gaps)) == ("", "One two", 2, 1)
    assert (sample.prompt_tokens, sample.output_tokens, sample.has_usage) == (7, 5, True)
    assert 0 < sample.ttft <= sample.latency


async def test_the_event_of_the_role_and_that_of_the_finish_reason_are_no_chunks() -> None:
    stream = event(ROLE) + delta(reasoning="Hm") + delta(content="Yes") + delta("stop") + DONE
    sample = await sample_of(stream)
    assert (sample.error, sample.text, sample.chunks) == ("", "HmYes", 2)
    assert (sample.output_tokens, sample.has_usage, sample.prompt_tokens) == (2, False, 3)


async def test_a_token_without_text_is_a_chunk() -> None:
    assert (await sample_of(text("") + text("a") + text("", "stop") + DONE)).chunks == 2


async def test_a_single_token_that_comes_with_the_finish_reason_has_a_time() -> None:
    sample = await sample_of(text("", "length") + event({"choices": [], "usage": USAGE}) + DONE)
    assert sample.error == ""
    assert sample.ttft == sample.latency > 0


async def test_tool_calls_are_output() -> None:
    call = {"delta": {"tool_calls": [{"function": {"name": "f", "arguments": "{}"}}]}, "finish_reason": None}
    assert (await sample_of(event(ROLE) + event({"choices": [call]}) + delta("tool_calls") + DONE)).text == "f{}"


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (b'{"error": {"message": "too long"}}', 400, "HTTP 400: too long"),
        (b"bad\n gateway", 502, "HTTP 502: bad gateway"),
        (text("One") + event({"error": {"message": "engine lost"}}) + DONE, 200, "engine lost"),
        (text("One"), 200, "the stream ended early"),
        (b"data: {no json\n\n", 200, "JSONDecodeError: "),
    ],
)
async def test_what_fails_is_a_sample_with_its_error(answer: bytes, status: int, error: str) -> None:
    assert (await sample_of(answer, status)).error.startswith(error)


async def test_a_connection_that_fails_is_a_sample_with_its_error() -> None:
    async with serving(always(b"")) as server:
        pass
    async with open_session(server.url) as session:
        assert "127.0.0.1" in (await send(session, Call(server.url, b"{}", {}, 3))).error


async def tokenize(request: Request) -> tuple[int, bytes]:
    """A letter is a token. With special tokens there is one more, and a chat has a colon in front."""
    match request.path, request.body:
        case "/tokenize", {"messages": [{"content": content}]}:
            return 200, json.dumps({"tokens": [ord(letter) for letter in f":{content}"]}).encode()
        case "/tokenize", {"prompt": prompt, "add_special_tokens": special}:
            return 200, json.dumps({"tokens": [0] * special + [ord(letter) for letter in prompt]}).encode()
        case "/detokenize", {"tokens": tokens}:
            return 200, json.dumps({"prompt": "".join(map(chr, tokens))}).encode()
    return 404, b"{}"


async def test_the_server_tokenizes_if_the_model_is_no_folder() -> None:
    async with serving(tokenize) as server:
        found = await asyncio.to_thread(find_tokenizer, None, "org/model", "served", server.url, {"X-A": "b"})
        assert found.name == f"{server.url}/tokenize"
        assert found.num_special_tokens == 1
        assert await asyncio.to_thread(found.render_chat, "Hi") == ":Hi"
        prompts = await asyncio.to_thread(make_prompts, DatasetOptions(num_prompts=2, input_len=9), found)
        assert [len(prompt.text) for prompt in prompts] == [8, 8]
        assert {request.headers["x-a"] for request in server.requests} == {"b"}
        assert {request.body["model"] for request in server.requests} == {"served"}


async def test_without_a_tokenizer_anywhere_the_flag_is_named() -> None:
    async with serving(always(b"{}", 404)) as server:
        with pytest.raises(ValueError, match="give a folder or a hub id as --tokenizer"):
            await asyncio.to_thread(find_tokenizer, None, "served", "served", server.url, {})
    async with serving(always(b'{"error": {"message": "no such model"}}', 404)) as server:
        with pytest.raises(ValueError, match=r"no tokenizer for served \(.*/tokenize: no such model\)"):
            await asyncio.to_thread(find_tokenizer, None, "served", "served", server.url, {})


async def test_the_files_of_the_flag_come_before_the_server() -> None:
    found = find_tokenizer("builtin", "served", "served", "http://127.0.0.1:9", {})
    assert found.name == "builtin"


class Work:
    """In place of sending requests. `most`: the most that were sent at once. `sent` gets each call."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.sent = asyncio.Queue[Call]()
        self.goes_on = asyncio.Event()

    async def send(self, call: Call) -> Sample:
        self.running += 1
        self.most = max(self.most, self.running)
        self.sent.put_nowait(call)
        await self.goes_on.wait()
        self.running -= 1
        return Sample(0.0, text=call.body.decode())


async def run(work: Work, max_concurrency: int | None, seconds: float, stop: asyncio.Event | None = None) -> Measured:
    calls = [Call("", str(index).encode(), {}, None) for index in range(6)]
    load = Load(calls, [0.0] * 6, max_concurrency, seconds)
    return await run_load(load, work.send, lambda sample: None, stop or asyncio.Event())


async def test_never_more_requests_at_once_than_allowed_and_samples_in_order() -> None:
    work = Work()
    running = asyncio.create_task(run(work, 2, 60))
    await work.sent.get()
    await work.sent.get()
    work.goes_on.set()
    measured = await running
    assert work.most == 2
    assert [sample.text for sample in measured.samples] == [str(index) for index in range(6)]
    assert measured.unfinished == 0
    assert measured.samples[0].queued <= measured.samples[5].queued


async def test_what_has_not_ended_when_time_is_up_is_counted() -> None:
    measured = await run(Work(), None, 0.05)
    assert (len(measured.samples), measured.unfinished) == (0, 6)


async def test_what_has_ended_before_a_stop_is_kept() -> None:
    work, stop = Work(), asyncio.Event()
    running = asyncio.create_task(run(work, 1, 60, stop))
    await work.sent.get()
    work.goes_on.set()
    await work.sent.get()  # the first one has ended
    work.goes_on.clear()
    stop.set()
    measured = await running
    assert measured.samples
    assert measured.samples[0].text == "0"
    assert len(measured.samples) + measured.unfinished == 6


async def test_an_error_of_the_program_itself_is_raised() -> None:
    async def fail(call: Call) -> Sample:
        raise RuntimeError("a bug")

    with pytest.raises(ExceptionGroup):
        await run_load(Load([Call("", b"", {}, 0)], [0.0], None, 60), fail, lambda sample: None, asyncio.Event())


@dataclass(frozen=True)
class Command:
    """`proa bench serve` with prompts of a file, so that no tokenizer is needed."""

    server: Server
    folder: Path

    def run(self, *words: str) -> int:
        prompts = self.folder / "prompts.jsonl"
        prompts.write_text('{"prompt": "One"}\n')
        common = ["--dataset-name=custom", f"--dataset-path={prompts}", "--skip-chat-template", "--disable-tqdm"]
        return main(["bench", "serve", f"--base-url={self.server.url}", *common, *words])


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A server in another thread, which lists a model and completes any prompt."""
    for name in ("PROA_API_KEY", "OPENAI_API_KEY"):
        monkeypatch.delenv(name, raising=False)

    async def handler(request: Request) -> tuple[int, bytes]:
        return 200, b'{"data": [{"id": "listed"}]}' if request.path == "/v1/models" else WHOLE

    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever)
    thread.start()

    async def start() -> Any:
        context = serving(handler)
        return context, await context.__aenter__()

    context, server = asyncio.run_coroutine_threadsafe(start(), loop).result()
    yield Command(server, tmp_path)
    asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def test_requests_have_the_fields_and_headers_of_the_flags(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROA_API_KEY", "sk-mine")
    flags = ["--temperature=0", "--top_k=4", "--ignore-eos", '--extra-body={"min_tokens": 2}', "--header", "x-a=b"]
    assert command.run("--num-prompts=2", "--custom-output-len=9", "--request-id-prefix=run-", *flags) == 0
    models, *requests = command.server.requests
    assert models.headers["authorization"] == "Bearer sk-mine"
    assert {request.headers["x-request-id"] for request in requests} == {"run-0", "run-1"}
    for request in requests:
        assert (request.path, request.headers["x-a"]) == ("/v1/completions", "b")
        assert request.headers["authorization"] == "Bearer sk-mine"
        assert request.body == {
            "model": "listed",
            "prompt": "One",
            "max_tokens": 9,
            "temperature": 0.0,
            "top_k": 4,
            "stream": True,
            "stream_options": {"include_usage": True},
            "ignore_eos": True,
            "min_tokens": 2,
        }


def test_chats_have_messages_and_adapters_take_turns(command: Command) -> None:
    loras = ["--lora-modules", "a", "b", "--lora-assignment=round-robin"]
    assert command.run("--num-prompts=4", "--backend=openai-chat", "--output-len=3", "--max-concurrency=1", *loras) == 0
    requests = command.server.requests[1:]
    assert [request.body["model"] for request in requests] == ["a", "b", "a", "b"]
    for request in requests:
        assert request.path == "/v1/chat/completions"
        assert request.body["messages"] == [{"role": "user", "content": "One"}]
        assert request.body["max_completion_tokens"] == 3


def test_results_are_printed_and_saved(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    saving = ["--save-result", "--save-detailed", "--metadata", "cards=1", f"--result-dir={command.folder}/new"]
    assert command.run("--num-prompts=3", "--num-warmups=2", "--ready-check-timeout-sec=60", *saving) == 0
    printed = capsys.readouterr().out
    assert "Successful requests:                     3" in printed
    assert "A chunk had 2.50 tokens on average" in printed
    [path] = (command.folder / "new").iterdir()
    assert path.name.startswith("openai-infqps-listed-")
    results = json.loads(path.read_text())
    assert (results["completed"], results["total_input_tokens"], results["total_output_tokens"]) == (3, 21, 15)
    assert (results["request_rate"], results["model_id"], results["cards"]) == ("inf", "listed", "1")
    assert results["generated_texts"] == ["One two"] * 3
    assert len(command.server.requests) == 1 + 1 + 2 + 3  # the models, the check, the warm-up, the run


def test_the_status_is_1_if_all_requests_fail(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    command.server.handler = always(b'{"error": {"message": "no engine"}}', 503)
    assert command.run("--num-prompts=3", "--model=listed") == 1
    assert "3 requests failed, the first with: HTTP 503: no engine" in capsys.readouterr().out


def test_a_server_that_does_not_get_ready_in_time_ends_the_command(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.server.handler = always(b"loading", 503)
    assert command.run("--model=listed", "--ready-check-timeout-sec=0.1") == 1
    assert "no request succeeded in 0.1 s (--ready-check-timeout-sec): HTTP 503: loading" in capsys.readouterr().err


def test_an_interrupt_prints_what_was_measured(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    async def handler(request: Request) -> tuple[int, bytes]:
        if len(command.server.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            await asyncio.sleep(600)
        return 200, WHOLE

    command.server.handler = handler
    assert command.run("--model=listed", "--num-prompts=9", "--max-concurrency=1") == 0
    printed = capsys.readouterr().out
    assert "Successful requests:                     2" in printed
    assert "7 requests had not ended, or were not sent, when the run was stopped." in printed


def test_a_folder_of_results_that_cannot_be_made_ends_the_command_before_it_measures(
    command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    file = command.folder / "file"
    file.touch()
    assert command.run("--save-result", f"--result-dir={file}/results") == 1
    assert capsys.readouterr().err == f"proa bench serve: error: --result-dir {file}/results: Not a directory\n"
    assert not command.server.requests


@pytest.mark.parametrize(
    ("path", "status", "message", "reason"),
    [
        ("", 401, "No key.", "No key; the variable PROA_API_KEY has the key, or a --header"),
        ("", 200, "none", "URL/v1/models lists no model: none; give --model"),
        ("/v1", 404, "Not Found", "URL/v1/v1/models lists no model: Not Found; leave /v1 out of --base-url"),
    ],
)
def test_a_server_that_lists_no_model_gets_the_reason_and_what_to_do(
    path: str, status: int, message: str, reason: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    command.server.handler = always(json.dumps({"error": message}).encode(), status)
    assert command.run(f"--base-url={command.server.url}{path}") == 1
    assert capsys.readouterr().err == f"proa bench serve: error: {reason.replace('URL', command.server.url)}\n"


def test_a_server_that_does_not_answer_is_given_up(
    command: Command, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(serve, "_LIST_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}"
        assert command.run(f"--base-url={url}") == 1
    assert capsys.readouterr().err == f"proa bench serve: error: {url}/v1/models does not answer within 0.1 s\n"


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--profile"], "--profile is not a flag here: a profiler would change what is measured"),
        (["--dataset-name=random"], "--dataset-path needs --dataset-name sharegpt or custom, not random"),
        (["--ramp-up-strategy=linear"], "--ramp-up-strategy needs --ramp-up-start-rps and --ramp-up-end-rps"),
        (["--num-prompts=0"], "num_prompts must be at least 1, got 0"),
    ],
)
def test_wrong_flags_get_one_sentence(
    words: list[str], reason: str, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    assert command.run(*words) == 1
    assert capsys.readouterr().err == f"proa bench serve: error: {reason}\n"
