"""`proa chat` and `proa complete`: one question, or one after the other, to the model of a running server.

Answers go to the standard output, reasoning and notes to the standard error.
"""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from proa_cli.endpoints import Chat, Completion, Endpoint, Settings
from proa_cli.http_api import ApiError, HttpApi, add_server_arguments, connect
from proa_cli.typed import HELP, Command, read_typed

_DIM, _RESET = "\x1b[2m", "\x1b[0m"


@dataclass(slots=True)
class _Answer:
    text: str = ""
    num_tokens: int = 0
    finish_reason: str | None = None
    started: float = 0.0
    first_at: float | None = None  # when its first part came, on the monotonic clock

    def stats(self, now: float) -> str:
        """The rate is of the whole time: the first event may have several tokens."""
        seconds = now - self.started
        first = seconds if self.first_at is None else self.first_at - self.started
        rate = self.num_tokens / seconds if seconds > 0 else 0.0
        return f"{self.num_tokens} tokens in {seconds:.2f} s, {rate:.1f} tokens/s, first after {first:.2f} s"


def chat(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    _add_arguments(parser, Chat.noun)
    # The second name is vLLM's.
    parser.add_argument(
        "--system", "--system-prompt", metavar="TEXT", help="message of the role system, before all others"
    )
    return _converse(parser.parse_args(words), Chat())


def complete(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    _add_arguments(parser, Completion.noun)
    return _converse(parser.parse_args(words), Completion())


def _add_arguments(parser: argparse.ArgumentParser, noun: str) -> None:
    add_server_arguments(parser)
    parser.add_argument("--model-name", metavar="NAME", help="model to ask (default: the first one that is listed)")
    parser.add_argument(
        "--temperature", type=float, metavar="T", help="0: the most likely token (default: the server's)"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="limit of tokens of an answer (default: the server's)"
    )
    parser.add_argument("-q", "--quick", metavar=noun.upper(), help=f"ask with this {noun} only, then exit")
    parser.add_argument("--stats", action="store_true", help="show tokens, time to the first token, tokens a second")


def _converse(arguments: argparse.Namespace, endpoint: Endpoint) -> int:
    """Ask with `--quick`, with the standard input if it is no terminal, or with lines that are typed. Returns the exit
    status. Raises `KeyboardInterrupt`."""
    try:
        api = connect(arguments)
        given = {name: value for name, value in vars(arguments).items() if name in endpoint.readers}
        model = arguments.model_name or _first_model(api)
        settings = Settings(endpoint.readers, {"model": model, **given})
        conversation = _Conversation(api, endpoint, settings, arguments.stats)
        if arguments.quick is not None:
            conversation.ask(arguments.quick)
        elif not sys.stdin.isatty():
            if not (text := sys.stdin.read().removesuffix("\n")):
                raise ValueError(f"the standard input has no {endpoint.noun}")
            conversation.ask(text)
        else:
            conversation.ask_typed()
        return 0
    except (ApiError, ValueError) as error:
        _note(f"error: {error}")
        return 1


class _Conversation:
    def __init__(self, api: HttpApi, endpoint: Endpoint, settings: Settings, has_stats: bool) -> None:
        self._api = api
        self._endpoint = endpoint
        self._settings = settings
        self._has_stats = has_stats

    def ask(self, text: str) -> None:
        """Print the answer as it comes. Raises `ApiError`, and `KeyboardInterrupt` for Ctrl-C."""
        answer = _Answer(started=time.monotonic())
        try:
            self._print(text, answer)
        except KeyboardInterrupt:
            self._keep(text, answer)
            raise
        self._keep(text, answer)
        if answer.finish_reason == "length":
            _note("the answer was cut off at the limit of its length")
        if self._has_stats:
            _note(answer.stats(time.monotonic()))

    def ask_typed(self) -> None:
        """Ask with what is typed, one message after the other, until Ctrl-D. Ctrl-C stops an answer, whose beginning is
        kept."""
        with contextlib.suppress(ImportError):  # not in every build of Python
            import readline  # noqa: F401 input() then has its keys and its history
        model = self._settings.values["model"]
        _note(f"{model} at {self._api.url}. Ctrl-C stops an answer, Ctrl-D ends, /help lists commands.")
        while True:
            try:
                typed = read_typed()
                if isinstance(typed, Command):
                    self._obey(typed)
                elif typed:
                    self.ask(typed)
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
            except (ApiError, ValueError) as error:
                _note(f"error: {error}")

    def _obey(self, command: Command) -> None:
        """Raises `ValueError` for a command that does not exist or has a wrong value, `EOFError` for the one that
        ends."""
        match command:
            case Command("help" | "?"):
                _show(HELP.format(noun=self._endpoint.noun, names=", ".join(self._settings.names)))
            case Command("clear"):
                self._endpoint.clear()
                _note("the conversation is forgotten")
            case Command("set", ""):
                _show("\n".join(f"{name} {value}" for name, value in self._settings.values.items()))
            case Command("set", name, value):
                self._settings.set(name, value)
            case Command("bye"):
                raise EOFError
            case Command(name):
                raise ValueError(f"there is no command /{name}; /help lists all")

    def _print(self, text: str, answer: _Answer) -> None:
        body = {**self._endpoint.body(text, self._settings.values), "stream": True}
        if self._has_stats:
            body["stream_options"] = {"include_usage": True}
        with _printer() as show, closing(self._api.stream(self._endpoint.path, body)) as events:
            for event in events:
                answer.num_tokens = (event.get("usage") or {}).get("completion_tokens", answer.num_tokens)
                for choice in event.get("choices", ()):
                    reasoning, part = self._endpoint.read(choice)
                    if answer.first_at is None and (reasoning or part):
                        answer.first_at = time.monotonic()
                    answer.text += part
                    answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
                    show.add(reasoning, part)

    def _keep(self, text: str, answer: _Answer) -> None:
        if answer.text:
            self._endpoint.keep(text, answer.text)


class _Printer:
    """Prints an answer, its reasoning dim, or between lines that name both where there are no colors."""

    def __init__(self, has_colors: bool) -> None:
        self._opening, self._closing = (_DIM, f"{_RESET}\n\n") if has_colors else ("[reasoning]\n", "\n[answer]\n")
        self._reasons = False
        self._ends_line = True

    def add(self, reasoning: str, text: str) -> None:
        if reasoning:
            self._write(sys.stderr, reasoning if self._reasons else self._opening + reasoning)
            self._reasons = True
        if text:
            self._end_reasoning()
            self._write(sys.stdout, text)
            self._ends_line = text.endswith("\n")

    def end(self) -> None:
        self._end_reasoning()
        if not self._ends_line:
            self._write(sys.stdout, "\n")

    def _end_reasoning(self) -> None:
        if self._reasons:
            self._write(sys.stderr, self._closing)
            self._reasons = False

    def _write(self, stream: Any, text: str) -> None:
        stream.write(text)
        stream.flush()


@contextlib.contextmanager
def _printer() -> Iterator[_Printer]:
    printer = _Printer(sys.stderr.isatty() and not os.environ.get("NO_COLOR"))
    try:
        yield printer
    finally:
        printer.end()


def _first_model(api: HttpApi) -> str:
    """Raises `ApiError`."""
    names = api.models()
    if not names:
        raise ApiError(f"{api.url} has no model yet")
    return names[0]


def _note(text: str) -> None:
    _show(f"proa: {text}")


def _show(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
