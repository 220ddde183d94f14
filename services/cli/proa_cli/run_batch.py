"""`proa run-batch`: an engine and a gateway for as long as they answer the requests of a file.

A running gateway is asked with `proa-gateway run-batch`, which this command runs too.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from proa_cli.serve import start
from proa_gateway.batch.files import open_output

_RUNNING = "a running gateway is asked with `proa-gateway run-batch`"
_ALONE = "only the batch has access to the gateway"
_NOT_HERE = {"--url": _RUNNING, "--engine": _RUNNING, "--host": _ALONE, "--port": _ALONE, "--api-key": _ALONE}


def main(parser: argparse.ArgumentParser, words: Sequence[str]) -> int:
    parser.usage = "%(prog)s -i FILE -o FILE --model MODEL [--FLAG ...]"
    parser.epilog = "The other flags are those of `proa serve`."
    parser.add_argument("-i", "--input-file", type=Path, required=True, metavar="FILE", help="requests, one a line")
    parser.add_argument(
        "-o",
        "--output-file",
        type=Path,
        required=True,
        metavar="FILE",
        help="responses, appended as they come; a request whose custom_id is in it is not sent again",
    )
    parser.add_argument("--model", required=True, help="a folder, an id of the Hugging Face hub, or builtin")
    parser.add_argument("--max-concurrency", type=int, default=64, metavar="N", help="limit of requests at once")
    arguments, of_serve = argparse.ArgumentParser.parse_known_args(parser, words)  # Parser's own refuses unknown flags
    for name in (word.partition("=")[0] for word in of_serve):
        if name in _NOT_HERE:
            parser.error(f"{name}: {_NOT_HERE[name]}")
    if arguments.max_concurrency < 1:
        parser.error(f"--max-concurrency must be at least 1, got {arguments.max_concurrency}")
    try:
        with arguments.input_file.open("rb"), open_output(arguments.output_file):
            pass  # they can be used; before the model is loaded
    except (OSError, ValueError) as error:
        parser.error(str(error))
    files = [f"--input-file={arguments.input_file}", f"--output-file={arguments.output_file}"]
    limit = f"--max-concurrency={arguments.max_concurrency}"
    command = [sys.executable, "-m", "proa_gateway", "run-batch", *files, limit]
    return start([arguments.model, *of_serve, "--host=127.0.0.1", "--port=0"], lambda url: [*command, f"--url={url}"])
