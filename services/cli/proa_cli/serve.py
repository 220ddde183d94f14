"""`proa serve`: an engine and a gateway until Ctrl-C, SIGTERM, or until one of them exits; then both end.

With a command behind `--` it is run when the gateway is ready, and its end is the end.
"""

import argparse
import contextlib
import errno
import json
import os
import pickle
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from urllib.parse import urlsplit

from proa.addresses import host_and_port
from proa.environment import variable_of
from proa_cli import serve_help
from proa_cli.arguments import HOST, Arguments, read_arguments
from proa_cli.gateway import Gateway
from proa_cli.output import Output, TextOutput, make_output, print_line
from proa_cli.programs import Program

_OPEN = (
    "listens on all addresses of this machine without an API key, for all who reach one of them; --host 127.0.0.1 is "
    "for this machine alone, --api-key KEY requires a key"
)
_ASKING = {"/v1/chat/completions": "chat", "/v1/completions": "complete"}  # by path, the command that sends requests


class _Failed(Exception):
    """Nothing can be served. The message says why."""


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    """Run until a signal. `read_arguments` reads the flags, and `serve_help` shows them."""
    words, command = _without_command(words)
    if not serve_help.WORDS.isdisjoint(words):
        serve_help.show(words)
    return start(words, lambda url: command)


def start(words: Sequence[str], make_command: Callable[[str], Sequence[str]]) -> int:
    """Serve with the flags `words`. `make_command`: from the API's URL, the command to run, which may be empty. Returns
    the exit status."""
    try:
        engine_port, metrics_port = _free_ports(2)
        environment = {variable_of("--metrics-port"): str(metrics_port), **os.environ}
        arguments = _with_port(read_arguments(words, environment, engine_port=engine_port))
        _check_address(arguments.gateway.host, arguments.url)  # before the model is loaded, as is the command
        command = make_command(arguments.url)
        if command and shutil.which(command[0]) is None:
            raise _Failed(f"cannot run {command[0]}: there is no such program")
    except (ValueError, _Failed) as error:
        return _fail(str(error))
    output = make_output(arguments.gateway.logs.log_format)
    for warning in warnings_of(arguments):
        output.own(warning, level="warning")
    gateway = Gateway(arguments.url, arguments.model, arguments.api_key)
    return run(commands_of(arguments), gateway, command, output)


def run(
    commands: Iterable[tuple[str, Sequence[str], float, bytes]],
    gateway: Gateway,
    command: Sequence[str],
    output: Output | None = None,
) -> int:
    """Run programs, given by name, command, drain timeout and standard input, of which one is `gateway`. The last one
    is stopped first. Returns the exit status."""
    stopping: list[int] = []  # signals received
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda number, frame: stopping.append(number))
    programs: list[Program] = []
    failure, output = "", output or TextOutput()
    try:
        for name, words, drain_timeout, given in commands:
            programs.append(Program(name, words, output, drain_timeout, given=given))
        return _watch(programs, gateway, command, stopping, output)
    except _Failed as error:
        failure = str(error)
    finally:
        for program in reversed(programs):  # of SIGTERM, a process manager may send several at once
            program.stop(hurries=lambda: stopping.count(signal.SIGINT) > 1)
            if program.error and program.error != failure:
                output.of_program(program.name, f"error: {program.error}")
    return _fail(failure, output)  # the last line, below what the other programs say of it


def warnings_of(arguments: Arguments) -> Iterator[str]:
    """Yield what the user should know before the model is loaded."""
    yield from arguments.notes
    if arguments.gateway.host in ("0.0.0.0", "::") and not arguments.needs_key:
        yield _OPEN


def _fail(reason: str, output: Output | None = None) -> int:
    (output or TextOutput()).own(f"error: {reason}", level="error")
    return 1


def _without_command(words: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    if "--" not in words:
        return words, ()
    place = words.index("--")
    return words[:place], words[place + 1 :]


def _check_address(host: str, url: str) -> None:
    """Raise `_Failed` if the gateway cannot listen on `host` and the port of `url`: where another program listens, that
    would answer in place of the gateway."""
    port, is_ipv6 = urlsplit(url).port, ":" in host
    with socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_ipv6:
            listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)  # as in the gateway
        try:
            listener.bind((host, port))
        except OSError as error:
            flag = "--port" if error.errno in (errno.EADDRINUSE, errno.EACCES) else "--host"
            raise _Failed(
                f"cannot listen on {host_and_port(host, port or 0)}: {error.strerror}; choose another {flag}"
            ) from None


def _with_port(arguments: Arguments) -> Arguments:
    """The arguments with a free port in place of port 0."""
    if arguments.gateway.port != 0:
        return arguments
    (port,) = _free_ports(1)
    return replace(arguments, gateway=replace(arguments.gateway, port=port))


def commands_of(arguments: Arguments) -> list[tuple[str, list[str], float, bytes]]:
    """The programs for `run`. Their configurations, which have keys, are no words: all users of the machine can read
    those."""
    engine, gateway = arguments.engine, arguments.gateway
    return [
        ("engine", _given("proa_engine"), engine.drain_timeout, pickle.dumps(engine)),
        ("gateway", _given("proa_gateway"), gateway.deadlines.shutdown, pickle.dumps(gateway)),
    ]


def _given(package: str) -> list[str]:
    return [sys.executable, "-m", package, "serve-given"]


def _free_ports(number: int) -> list[int]:
    """So many different ports on which no program listens."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(number)]
        for listener in listeners:
            listener.bind((HOST, 0))
        return [int(listener.getsockname()[1]) for listener in listeners]


def _watch(
    programs: list[Program], gateway: Gateway, command: Sequence[str], stopping: Sequence[int], output: Output
) -> int:
    """Announce when the gateway is ready, and run the command. Returns the command's exit status when it has ended;
    after a signal 0, or if there is a command, the status of a program that the signal ended.

    Raises `_Failed` when the engine or the gateway has exited.
    """
    started, ready = time.monotonic(), False
    while not stopping:
        for program in programs:
            if (code := program.process.poll()) is not None:
                program.wait(time.monotonic() + 1)
                if program.name == "command":
                    return code
                reason = f": {program.last_line}" if program.last_line else ""
                raise _Failed(program.error or f"the {program.name} exited with status {code}{reason}")
        if not ready and (ready := gateway.is_ready()):
            announcement = f"ready after {time.monotonic() - started:.1f} s at {gateway.url}"
            if command:
                output.own(announcement)
                programs.append(_start_command(command, gateway.key, output))
            elif isinstance(output, TextOutput):
                output.own(f"{announcement}, in a browser a chat page. Ctrl-C stops. In another shell:\n")
                _show_uses(gateway)
            else:
                output.own(announcement)
        time.sleep(0.1)
    output.own("stopping, after the requests that run; Ctrl-C again stops at once")
    return 128 + stopping[0] if command else 0


def _start_command(command: Sequence[str], key: str, output: Output) -> Program:
    """Start the command, with the key that it needs to ask the gateway. Raises `_Failed`."""
    keys = {variable_of("--api-key"): key} if key else {}
    try:
        return Program("command", command, output, environment={**os.environ, **keys})
    except OSError as error:
        raise _Failed(f"cannot run {command[0]}: {error.strerror}") from None


def _show_uses(gateway: Gateway) -> None:
    """Print the command that asks the model, if there is one, and a request that it answers, to be copied."""
    path, body = gateway.example()
    if (command := _ASKING.get(path)) is not None:
        url = "" if gateway.url == "http://127.0.0.1:8000" else f" --url {gateway.url}/v1"  # the command's default
        print_line(f"  {_program()} {command}{url}")
    key = ' -H "Authorization: Bearer $PROA_API_KEY"' if gateway.needs_key() else ""
    print_line(f"  curl -N {gateway.url}{path} -H 'Content-Type: application/json'{key} -d '{json.dumps(body)}'\n")


def _program() -> str:
    """How a shell in this folder calls this program: by its path if it is below the folder, in an environment that is
    not activated, as after `make run`."""
    here, program = Path.cwd(), Path(sys.argv[0])
    is_on_path = program.name != "proa" or "VIRTUAL_ENV" in os.environ or not program.is_relative_to(here)
    return "proa" if is_on_path else str(program.relative_to(here))
