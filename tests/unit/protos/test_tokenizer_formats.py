"""Folders with tekken.json, tiktoken's file, SentencePiece's or vocab.json in the place of tokenizer.json."""

import base64
import json
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from proa import tokenizer_files
from proa.tokenizer_files import load_tokenizer
from proa.tokenizer_formats.byte_alphabet import spell
from proa.tokenizer_formats.convert import with_tokenizer
from proa_engine.preflight.tokenizers import read_tokenizer
from proa_engine.sources import folders

BYTES = [bytes([byte]) for byte in range(256)]
MERGED = [b"th", b"he", b"the", b" t", b" the", "é".encode(), b"12"]
WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|[^\p{L}\p{N}]+"
# Pieces of SentencePiece with their types: unknown, control, user-defined, bytes, and plain ones.
PIECES = [
    *(("<unk>", 0.0, 2), ("<s>", 0.0, 3), ("</s>", 0.0, 3), ("<0xC3>", 0.0, 6), ("<0xA4>", 0.0, 6)),
    *(("▁", -9.0, 1), ("a", -8.0, 1), ("b", -8.5, 1), ("▁a", -2.0, 1), ("ab", -1.0, 1), ("▁ab", -3.0, 1)),
    *(("\n\n", 0.0, 4), ("\n", -4.0, 1)),
]


def tekken(**fields: object) -> bytes:
    vocab = [{"rank": rank, "token_bytes": base64.b64encode(each).decode()} for rank, each in enumerate(BYTES + MERGED)]
    config = {"pattern": WORDS, "default_vocab_size": 3 + 256 + 6, "default_num_special_tokens": 3}
    return json.dumps({"config": config, "vocab": vocab, **fields}).encode()


def tiktoken(tokens: Sequence[bytes]) -> bytes:
    return b"".join(base64.b64encode(token) + b" %d\n" % rank for rank, token in enumerate(tokens))


def field(number: int, value: int | float | bytes) -> bytes:
    """A field of a protobuf message."""
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    if isinstance(value, int):
        return varint(number << 3) + varint(value)
    return varint(number << 3 | 2) + varint(len(value)) + value


def varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + varint(value >> 7)


def sentencepiece(*, model_type: int, prefixed: bool) -> bytes:
    pieces = (field(1, field(1, text.encode()) + field(2, score) + field(3, kind)) for text, score, kind in PIECES)
    trainer = field(3, model_type) + field(35, 1)  # with byte fallback
    normalizer = field(1, b"identity") + field(3, int(prefixed)) + field(4, 0)
    return b"".join(pieces) + field(2, trainer) + field(3, normalizer)


def convert(name: str, data: bytes, config: Mapping[str, object] | None = None) -> Tokenizer:
    files = {name: data} if config is None else {name: data, "tokenizer_config.json": json.dumps(config).encode()}
    converted = with_tokenizer(files)
    assert name not in converted
    return load_tokenizer(converted)


def test_the_tokens_of_a_tekken_file_follow_its_special_tokens() -> None:
    tokenizer = convert("tekken.json", tekken())
    # The last rank, that of 12, is beyond `default_vocab_size`.
    assert tokenizer.encode("the the12é").tokens == ["<s>", "the", "Ġthe", "1", "2", "Ã©"]
    assert tokenizer.encode("the").ids == [1, 3 + 256 + 2]
    assert tokenizer.decode(tokenizer.encode("the é").ids) == "the é"
    assert tokenizer.get_vocab_size() == 3 + 256 + 6


def test_special_tokens_of_a_tekken_file_have_its_names() -> None:
    named = [{"rank": 0, "token_str": "<unk>", "is_control": True}, {"rank": 2, "token_str": "[X]", "is_control": True}]
    tokenizer = convert("tekken.json", tekken(special_tokens=named))
    assert tokenizer.encode("a[X]").tokens == ["a", "[X]"]
    assert tokenizer.id_to_token(1) == "<SPECIAL_1>"


def test_a_tekken_file_brings_the_names_of_special_tokens() -> None:
    files = with_tokenizer({"tekken.json": tekken()})
    assert json.loads(files["tokenizer_config.json"])["eos_token"] == "</s>"
    own = {"tekken.json": tekken(), "tokenizer_config.json": b'{"eos_token": "x"}'}
    assert with_tokenizer(own)["tokenizer_config.json"] == b'{"eos_token": "x"}'


def test_special_tokens_follow_those_of_a_tiktoken_file() -> None:
    config = {"added_tokens_decoder": {"264": {"content": "<|im_end|>"}}}
    tokenizer = convert("tiktoken.model", tiktoken(BYTES + MERGED), config)
    assert tokenizer.encode("the the 123 中文x<|im_end|>").tokens == [
        *("the", "Ġthe", "Ġ", "12", "3", "Ġ", *"ä\u00b8\u0143æ\u0138\u0129", "x", "<|im_end|>")
    ]
    assert tokenizer.encode("<|im_end|><|reserved_token_265|>").ids == [264, 265]
    assert tokenizer.get_vocab_size() == 263 + 256


@pytest.mark.parametrize("model_type", [1, 2])
@pytest.mark.parametrize(
    ("text", "prefixed", "tokens"),
    [
        ("ab a", True, ["<s>", "▁ab", "▁a"]),
        ("ab a", False, ["<s>", "ab", "▁a"]),
        ("aä", False, ["<s>", "a", "<0xC3>", "<0xA4>"]),
        ("a\n\n\nb</s>", False, ["<s>", "a", "\n\n", "\n", "b", "</s>"]),
    ],
)
def test_pieces_of_sentencepiece_are_found(model_type: int, text: str, prefixed: bool, tokens: list[str]) -> None:
    data = sentencepiece(model_type=model_type, prefixed=prefixed)
    tokenizer = convert("tokenizer.model", data)
    assert tokenizer.encode(text).tokens == tokens
    assert tokenizer.decode(tokenizer.encode(text).ids) == text.removesuffix("</s>")
    assert convert("tokenizer.model", data, {"add_bos_token": False}).encode(text).tokens == tokens[1:]


def test_tokens_that_were_added_behind_the_pieces_are_found() -> None:
    config = {"added_tokens_decoder": {str(len(PIECES)): {"content": "<|im_end|>", "special": True}}}
    tokenizer = convert("tokenizer.model", sentencepiece(model_type=2, prefixed=False), config)
    assert tokenizer.encode("a<|im_end|>").ids == [1, 6, len(PIECES)]


def test_a_folder_is_read_with_the_file_that_it_has(tmp_path: Path) -> None:
    (tmp_path / "tekken.json").write_bytes(tekken())
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece(model_type=2, prefixed=True))
    for read in (tokenizer_files.read_tokenizer_files, folders.read_tokenizer_files):
        files = read(tmp_path)
        assert set(files) == {"tokenizer.json", "tokenizer_config.json"}
        assert load_tokenizer(files).get_vocab_size() == 265
    (tmp_path / "tokenizer.json").write_bytes(b"as it is")
    assert folders.read_tokenizer_files(tmp_path) == {"tokenizer.json": b"as it is"}


@pytest.mark.parametrize(
    ("name", "data", "sentence"),
    [
        ("tekken.json", b"{}", "tekken.json cannot be converted to tokenizer.json: KeyError: 'config'"),
        ("tekken.json", tekken()[:50], "tekken.json cannot be converted to tokenizer.json: JSONDecodeError"),
        ("tiktoken.model", b"no token\n", "has a line that is no token: b'no token'"),
        ("tokenizer.model", b"", "has no pieces: it is not SentencePiece's"),
        ("tokenizer.model", sentencepiece(model_type=2, prefixed=True)[:-3], "is cut, or not SentencePiece's"),
        ("tokenizer.model", sentencepiece(model_type=4, prefixed=True), "is neither BPE nor unigram"),
        ("tokenizer.model", tiktoken(BYTES), "is not SentencePiece's|is cut, or not SentencePiece's"),
    ],
)
def test_what_cannot_be_converted_is_named(name: str, data: bytes, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence):
        with_tokenizer({name: data})


def bpe_folder(folder: Path, name: str, **fields: object) -> Path:
    """vocab.json and merges.txt as older models have them, with bytes, a few merges and added tokens."""
    merges = ["t h", "th e", "Ġ the", "Ã ©", "1 2", "Ġ Ġ", "' s", "Ċ Ċ"]
    tokens = [*map(spell, BYTES), *(merge.replace(" ", "") for merge in merges), "<|endoftext|>"]
    added = {
        "264": {"content": "<|endoftext|>", "special": True},
        "265": {"content": "<|im_end|>", "special": True},
        "266": {"content": "<think>", "special": False},
        "267": {"content": "[é]", "special": False, "normalized": True, "lstrip": True},
    }
    config = {"tokenizer_class": name, "added_tokens_decoder": added, "eos_token": "<|im_end|>", **fields}
    (folder / "vocab.json").write_text(json.dumps({token: number for number, token in enumerate(tokens)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("name", ["Qwen2Tokenizer", "Qwen2TokenizerFast", "GPT2Tokenizer"])
def test_ids_of_vocab_and_merges_are_those_of_transformers(tmp_path: Path, name: str) -> None:
    reference = AutoTokenizer.from_pretrained(bpe_folder(tmp_path, name))
    tokenizer = load_tokenizer(tokenizer_files.read_tokenizer_files(tmp_path))
    for text in (
        "the the's THE'S 1234 12  the\n\n\n the ",
        "é e\u0301 中文 русский العربية हिन्दी 日本語 🙂👩‍👩‍👧 \u00a0\u2003x\t\r\n",
        "<|im_end|>the<|endoftext|> <think> a </think> [é]  [e\u0301]<|im_start|>",
    ):
        ids = reference.encode(text)
        assert tokenizer.encode(text).ids == ids
        assert tokenizer.decode(ids, skip_special_tokens=False) == reference.decode(ids)


@pytest.mark.parametrize(
    "fields", [{"tokenizer_class": "RobertaTokenizer"}, {"add_prefix_space": True}, {"added_tokens_decoder": {}}]
)
def test_vocab_and_merges_of_other_kinds_are_not_converted(tmp_path: Path, fields: dict[str, object]) -> None:
    bpe_folder(tmp_path, "GPT2Tokenizer", **fields)
    with pytest.raises(ValueError, match=r"has no tokenizer\.json; convert its vocab\.json with transformers"):
        read_tokenizer(tmp_path)


def test_damaged_merges_are_named(tmp_path: Path) -> None:
    (bpe_folder(tmp_path, "Qwen2Tokenizer") / "merges.txt").write_text("a b c\n")
    with pytest.raises(ValueError, match=r"merges\.txt has a line that is no merge: 'a b c'"):
        read_tokenizer(tmp_path)
    (tmp_path / "merges.txt").unlink()
    with pytest.raises(ValueError, match=r"vocab\.json cannot be converted .* there is no merges\.txt beside it"):
        read_tokenizer(tmp_path)


def test_a_processors_template_is_read_where_there_is_no_other(tmp_path: Path) -> None:
    (bpe_folder(tmp_path, "Qwen2Tokenizer") / "chat_template.json").write_text('{"chat_template": "mine"}')
    for read in (tokenizer_files.read_tokenizer_files, folders.read_tokenizer_files):
        assert read(tmp_path)["chat_template.jinja"] == b"mine"
        assert "chat_template.json" not in read(tmp_path)
    bpe_folder(tmp_path, "Qwen2Tokenizer", chat_template="the tokenizer's")
    assert "chat_template.jinja" not in folders.read_tokenizer_files(tmp_path)
    (bpe_folder(tmp_path, "Qwen2Tokenizer") / "chat_template.jinja").write_text("the file's")
    assert folders.read_tokenizer_files(tmp_path)["chat_template.jinja"] == b"the file's"
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "chat_template.json").write_text('{"chat_template": 5}')
    with pytest.raises(ValueError, match=r"chat_template\.json: chat_template must be a text"):
        folders.read_tokenizer_files(tmp_path)
