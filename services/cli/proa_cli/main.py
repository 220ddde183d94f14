"""The command line: `proa COMMAND …`."""

import os
import sys
from collections.abc import Sequence

from proa_cli.commands import Command, dispatch, make_parser

_INTERRUPTED = 130  # the exit status of a program that SIGINT ended
COMMANDS = (
    Command("serve", "run an engine and a gateway", "proa_cli.serve"),
    Command("bench", "measure a server or the engine", "proa_cli.bench.main"),
    Command("chat", "talk with the model of a running server", "proa_cli.conversation", "chat"),
    Command("complete", "let the model of a running server continue prompts", "proa_cli.conversation", "complete"),
    Command("transcribe", "print what is said in audio files", "proa_cli.transcribe"),
    Command("run-batch", "load a model and answer the requests of a file", "proa_cli.run_batch"),
    Command("collect-env", "print what a bug report needs", "proa_cli.collect_env"),
)


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return dispatch(make_parser("proa", "Proa on one machine."), COMMANDS, words)
    except BrokenPipeError:  # the program that reads the output has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it when it exits
        return 1
    except KeyboardInterrupt:
        return _INTERRUPTED
