"""Files of a tokenizer that are damaged, or of forms that few models have."""

import json
from dataclasses import dataclass
from typing import Any

from support.tokenizers import byte_level_tokenizer

TOKENIZER_JSON = byte_level_tokenizer().to_str()
DEEP = "[" * 100_000 + "]" * 100_000


@dataclass(frozen=True)
class OddFile:
    """`refusal`: in the sentence with which the model is refused; None: it is served. `chat_error`: in the error of
    each chat; None: chats work, or there is no template."""

    name: str
    data: bytes
    refusal: str | None = None
    chat_error: str | None = None

    def files(self) -> dict[str, bytes]:
        return {"tokenizer.json": TOKENIZER_JSON.encode(), self.name: self.data}


def _config(text: str | bytes, refusal: str | None = None) -> OddFile:
    return OddFile("tokenizer_config.json", text.encode() if isinstance(text, str) else text, refusal)


def _template(value: object, chat_error: str | None = None) -> OddFile:
    error = None if chat_error is None else f"tokenizer_config.json: chat_template{chat_error}"
    return OddFile("tokenizer_config.json", json.dumps({"chat_template": value}).encode(), chat_error=error)


def _generation(text: str, refusal: str | None = None) -> OddFile:
    return OddFile(
        "generation_config.json", text.encode(), None if refusal is None else f"generation_config.json: {refusal}"
    )


def _tokenizer(text: str | bytes | None = None, *, works: bool = False, **changes: Any) -> OddFile:
    data = json.dumps({**json.loads(TOKENIZER_JSON), **changes}) if text is None else text
    refusal = None if works else "tokenizer.json cannot be read: "
    return OddFile("tokenizer.json", data.encode() if isinstance(data, str) else data, refusal)


def _added(*tokens: tuple[int, str]) -> list[dict[str, Any]]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return [{"id": token_id, "content": content, **flags, "special": True} for token_id, content in tokens]


ODD_FILES = {
    "templates without names": _template([{"template": "x"}], "[0] must be an object with a name and a template"),
    "templates without texts": _template([{"name": "default"}], "[0] must be an object with a name and a template"),
    "templates that are texts": _template(["x"], "[0] must be an object with a name and a template"),
    "templates by name": _template({"default": "x", "tool_use": "y"}),
    "a template by name that is a number": _template({"default": 1}, " must be a text, or texts by name, not 1"),
    "no template": _template(None),
    "a number as template": _template(5, " must be a text, or texts by name, not 5"),
    "a switch as template": _template(True, " must be a text, or texts by name, not true"),
    "a template with an error": _template("{% if %}", ": the chat template does not compile: Expected an expression"),
    "a template that nests too deeply": _template("{{ " + "(" * 999 + "1" + ")" * 999 + " }}", ": the chat template"),
    "a template that takes too long": _template("{{ 10**10000000 }}", None),
    "a template that is no text": OddFile(
        "chat_template.jinja", b"\xff", chat_error="chat_template.jinja is not valid UTF-8"
    ),
    "a huge template": OddFile(
        "chat_template.jinja", b"x" * 10**6, chat_error="chat_template.jinja: the chat template has"
    ),
    "a configuration that is a list": _config("[]", "tokenizer_config.json must hold a JSON object"),
    "an empty configuration": _config("", "tokenizer_config.json is not valid JSON: it is empty"),
    "half a configuration": _config('{"a', "tokenizer_config.json is not valid JSON: "),
    "a configuration that is no text": _config(b'{"a": "\xff\xfe"}', "tokenizer_config.json is not valid JSON: "),
    "a deep configuration": _config('{"a": ' + DEEP + "}", "tokenizer_config.json is not valid JSON: "),
    "a configuration that is too deep": _config(
        '{"a": ' + "[" * 500 + "]" * 500 + "}", "tokenizer_config.json nests more than 100 deep"
    ),
    "a number of many digits": _config('{"a": ' + "9" * 5000 + "}", "tokenizer_config.json is not valid JSON: "),
    "special tokens of all kinds": _config(
        json.dumps({"bos_token": {"content": "<s>"}, "eos_token": {"x": 1}, "pad_token": 5, "unk_token": None})
    ),
    "NaN": _generation('{"temperature": NaN}', "temperature must be finite, got nan"),
    "infinity": _generation('{"top_p": Infinity}', "top_p must be finite, got inf"),
    "a text as number": _generation('{"temperature": "0.7"}', "temperature must be a number, got '0.7'"),
    "a switch as number": _generation('{"top_k": true}', "top_k must be an integer, got True"),
    "a fraction": _generation('{"top_k": 1.5}', "top_k must be an integer, got 1.5"),
    "a negative number": _generation('{"temperature": -1}', "temperature must be at least 0, got -1"),
    "null": _generation('{"top_p": null, "temperature": 0.5}'),
    "a list as defaults": OddFile("generation_config.json", b"[]", "generation_config.json must hold a JSON object"),
    "prompts that are a list": OddFile("config_sentence_transformers.json", b'{"prompts": [1], "query_prefix": 5}'),
    "half of the prompts": OddFile(
        "config_sentence_transformers.json", b"{", "config_sentence_transformers.json is not valid JSON: "
    ),
    "half a tokenizer": _tokenizer(TOKENIZER_JSON[:500]),
    "a tokenizer that is a list": _tokenizer("[]"),
    "an empty tokenizer": _tokenizer(""),
    "a tokenizer without a model": _tokenizer("{}"),
    "a tokenizer that is no text": _tokenizer(b'{"a": "\xff"}'),
    "a deep tokenizer": _tokenizer(DEEP),
    "a tokenizer with a name that is no text": _tokenizer(
        TOKENIZER_JSON.replace('"version":"1.0"', '"version":"1.0","name":"?"').encode().replace(b"?", b"\xff", 1)
    ),
    "added tokens that are a text": _tokenizer(added_tokens="x"),
    "added tokens that are null": _tokenizer(added_tokens=None),
    "added tokens without ids": _tokenizer(added_tokens=[{"content": "a"}]),
    "a negative id": _tokenizer(added_tokens=_added((-1, "x"))),
    "a very large id": _tokenizer(added_tokens=_added((2**31, "<big>")), works=True),
    "a token twice": _tokenizer(added_tokens=_added((70_000, "<a>"), (70_001, "<a>")), works=True),
    "an unknown decoder": _tokenizer(decoder={"type": "Unknown"}),
    "a pattern with an error": _tokenizer(
        pre_tokenizer={"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}
    ),
    "a post-processor without its token": _tokenizer(
        post_processor={
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<q>", "type_id": 0}}],
            "pair": [],
            "special_tokens": {},
        }
    ),
}
