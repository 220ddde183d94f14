"""What is typed into `proa chat` and `proa complete`: texts for the model, and commands, which are not sent."""

import re
from dataclasses import dataclass

HELP = '''\
/set               show the settings
/set NAME VALUE    change a setting of all later requests; without VALUE: to the server's default
                   names: {names}
/clear             forget the conversation; settings stay
/bye               end, as Ctrl-D does
"""                begin a {noun} or a VALUE of several lines, which ends with """
Any other line is a {noun}, also one that begins with a path, such as /etc/hosts.'''

_QUOTES = '"""'
_COMMAND = re.compile(r"/([a-z]+|\?)(?:\s+(\S+)(?:\s+(.*))?)?", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Command:
    """A command with its first word and the rest, empty if they are missing."""

    name: str
    word: str = ""
    rest: str = ""


def read_typed() -> str | Command:
    """Read a line from the terminal, or the lines between two `\"""`, which are never a command. Raises `EOFError` for
    Ctrl-D and `KeyboardInterrupt` for Ctrl-C."""
    text = input("> ").strip()
    if match := _COMMAND.fullmatch(text):
        name, word, rest = match.groups(default="")
        return Command(name, word, _read_to_end(rest))
    return _read_to_end(text)


def _read_to_end(text: str) -> str:
    """The text, or if it begins with quotes, all lines up to the closing ones, without both."""
    if not text.startswith(_QUOTES):
        return text
    text = text.removeprefix(_QUOTES)
    while not text.rstrip().endswith(_QUOTES):
        text += "\n" + input(". ")
    return text.rstrip().removesuffix(_QUOTES).strip("\n")
