"""`proa transcribe FILE …`: what is said in audio files, by a speech model of a running server.

The text goes to the standard output as it comes, errors to the standard error.
"""

import argparse
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from proa_cli.http_api import ApiError, Form, HttpApi, add_server_arguments, connect

FORMATS = ("text", "json", "srt", "verbose_json", "vtt")


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    parser.add_argument("files", nargs="+", type=Path, metavar="FILE", help="audio file, such as speech.mp3")
    add_server_arguments(parser)
    parser.add_argument("--model-name", metavar="NAME", help="speech model (default: the first one that is listed)")
    parser.add_argument("--language", metavar="CODE", help="language of the audio, such as en (default: found)")
    parser.add_argument("--prompt", metavar="TEXT", help="text as if it had been said before, such as names")
    parser.add_argument("--translate", action="store_true", help="translate to English")
    parser.add_argument("--format", choices=FORMATS, default="text", help="what to print (default: text)")
    parser.add_argument(
        "--timestamp-granularities",
        action="append",
        choices=("segment", "word"),
        default=[],
        help="what has times with --format verbose_json, may be repeated (default: segment)",
    )
    arguments = parser.parse_args(words)
    if arguments.timestamp_granularities and arguments.format != "verbose_json":
        parser.error("--timestamp-granularities needs --format verbose_json")
    try:
        api = connect(arguments)
        model = arguments.model_name or _first_model(api)
        fields = {"model": model, "language": arguments.language, "prompt": arguments.prompt}
        given = [(name, value) for name, value in fields.items() if value is not None]
        given += [("timestamp_granularities[]", each) for each in arguments.timestamp_granularities]
        path = "/audio/translations" if arguments.translate else "/audio/transcriptions"
        for file in arguments.files:
            _print(api, path, given, file, arguments.format)
        return 0
    except (ApiError, OSError, ValueError) as error:
        print(f"proa: error: {error}", file=sys.stderr)
        return 1


def _print(api: HttpApi, path: str, fields: Sequence[tuple[str, str]], file: Path, format: str) -> None:
    """Raises `ApiError` and `OSError`."""
    data = file.read_bytes()
    if format != "text":
        sys.stdout.write(f"{api.text(path, Form.of([*fields, ('response_format', format)], data)).rstrip()}\n")
        return
    with closing(api.stream(path, Form.of([*fields, ("stream", "true")], data))) as events:
        for event in events:
            if event.get("type") == "transcript.text.delta":
                sys.stdout.write(event["delta"])
                sys.stdout.flush()
    sys.stdout.write("\n")


def _first_model(api: HttpApi) -> str:
    """Raises `ApiError`."""
    names = api.models("transcribe")
    if not names:
        raise ApiError(f"{api.url} has no speech model; name one with --model-name if it should")
    return names[0]
