"""The tokenizer with which prompts of a given length are made: the model's files, or the server's endpoints."""

import json
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any, Protocol

from proa.addresses import is_loopback_url
from proa_cli.bench.client import message_of
from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.sources.resolve import resolve_model
from proa_engine.tokenizer import Tokenizer as EngineTokenizer

_SECONDS = 60.0  # for one request to the server


class Tokenizer(Protocol):
    """`name`: for the results. `plain_tokens`: ids of tokens that are text, from which random prompts are made.
    `num_special_tokens`: tokens that the server adds to a prompt."""

    name: str
    num_special_tokens: int

    @property
    def plain_tokens(self) -> Sequence[int]: ...

    def encode(self, text: str) -> list[int]:
        """The tokens of a text, without special tokens around it."""

    def decode(self, token_ids: Sequence[int]) -> str: ...

    def render_chat(self, text: str) -> str:
        """The prompt for an answer to one message of the user. Raises `ValueError` without a chat template."""


class LocalTokenizer:
    """Reads the tokenizer of a folder. Raises `ValueError` if there is none."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self._tokenizer = EngineTokenizer(read_tokenizer_files(folder))
        # Parts of a character would become U+FFFD, and a text with it is encoded as other tokens.
        self.plain_tokens = [each for each in self._tokenizer.plain_token_ids if "\ufffd" not in self.decode([each])]
        self.num_special_tokens = len(self._tokenizer.encode(""))

    def encode(self, text: str) -> list[int]:
        return self._tokenizer.encode(text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=False)

    def render_chat(self, text: str) -> str:
        return self._tokenizer.render_chat([{"role": "user", "content": text}])


class ServerTokenizer:
    """Asks the server's `/tokenize` and `/detokenize`, which Proa and vLLM have. Raises `OSError` if it has none."""

    def __init__(self, url: str, model: str, headers: Mapping[str, str]) -> None:
        self.name = f"{url}/tokenize"
        self._url, self._model, self._headers = url, model, headers
        handlers = [urllib.request.ProxyHandler({})] if is_loopback_url(url) else []
        self._opener = urllib.request.build_opener(*handlers)
        # The vocabulary is not known: the tokens are those of many short words.
        words = ("".join(letters) for letters in product("bdfglmnprst", "aeiou", "bdglmnrst"))
        self.plain_tokens = sorted(set(self.encode(" ".join(words))))
        self.num_special_tokens = len(self._tokenize(prompt="a", add_special_tokens=True)) - len(self.encode("a"))

    def encode(self, text: str) -> list[int]:
        return self._tokenize(prompt=text, add_special_tokens=False)

    def decode(self, token_ids: Sequence[int]) -> str:
        return str(self._post("/detokenize", tokens=list(token_ids))["prompt"])

    def render_chat(self, text: str) -> str:
        return self.decode(self._tokenize(messages=[{"role": "user", "content": text}], add_generation_prompt=True))

    def _tokenize(self, **fields: Any) -> list[int]:
        return [int(each) for each in self._post("/tokenize", **fields)["tokens"]]

    def _post(self, path: str, **fields: Any) -> Any:
        data = json.dumps({"model": self._model, **fields}).encode()
        headers = {"Content-Type": "application/json", **self._headers}
        with self._opener.open(urllib.request.Request(self._url + path, data, headers), timeout=_SECONDS) as response:
            return json.load(response)


def find_tokenizer(name: str | None, model: str, served_model: str, url: str, headers: Mapping[str, str]) -> Tokenizer:
    """The tokenizer `name`, a folder, a GGUF file, an id of the Hugging Face hub, or `builtin`. If it is None: the
    files of `model` if it is on the disk or `builtin`, otherwise the endpoints of the server at `url`, and if it has
    none the files of the hub's `model`. Raises `ValueError` if there is none.
    """
    if name is not None or model == "builtin" or Path(model).exists():
        return read_tokenizer(name or model)
    try:
        return ServerTokenizer(url, served_model, headers)
    except OSError as error:
        if "/" not in model:
            reason = f"{url}/tokenize: {_reason(error)}"
            raise ValueError(
                f"the server has no tokenizer for {served_model} ({reason}); give a folder or a hub id as --tokenizer"
            ) from None
    return read_tokenizer(model)


def _reason(error: OSError) -> str:
    """What the server says, if it has answered."""
    if not isinstance(error, urllib.error.HTTPError):
        return str(error)
    with error:
        return message_of(error.read()) or str(error)


def read_tokenizer(name: str) -> LocalTokenizer:
    """Raises `ValueError` if the folder or hub id `name` has no tokenizer."""
    try:
        return LocalTokenizer(name, resolve_model(name, None, "dummy"))
    except OSError as error:
        raise ValueError(f"cannot read the tokenizer of {name}: {error}") from None
