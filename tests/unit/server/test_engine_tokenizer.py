"""The model's tokenizer as the offline engine uses it."""

import json
from pathlib import Path

import pytest

from proa_engine.tokenizer import Tokenizer, read_tokenizer_files
from support.tokenizers import byte_level_tokenizer

TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}"


def make_tokenizer(*, template_file: str | None = None, **config: object) -> Tokenizer:
    files = {
        "tokenizer.json": byte_level_tokenizer().to_str().encode(),
        "tokenizer_config.json": json.dumps(config).encode(),
    }
    if template_file is not None:
        files["chat_template.jinja"] = template_file.encode()
    return Tokenizer(files)


def test_text_comes_back() -> None:
    tokenizer = make_tokenizer()

    assert tokenizer.decode(tokenizer.encode("naïve café 😀")) == "naïve café 😀"


def test_only_the_tokenizers_files_are_read(tmp_path: Path) -> None:
    assert read_tokenizer_files(None) == {}
    assert read_tokenizer_files(tmp_path) == {}
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())

    assert set(read_tokenizer_files(tmp_path)) == {"tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize("bos_token", ["<eos>", {"content": "<eos>"}])
def test_chat_template_sees_messages_and_special_tokens(bos_token: object) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATE, bos_token=bos_token)

    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])

    assert ids == tokenizer.encode("<eos>user: Hi\n")


def test_template_file_goes_before_the_config_and_default_before_others() -> None:
    named = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "default"}]

    assert make_tokenizer(chat_template=named).apply_chat_template([]) == make_tokenizer().encode("default")
    with_file = make_tokenizer(chat_template=named, template_file="file")
    assert with_file.apply_chat_template([]) == with_file.encode("file")


def test_template_can_refuse_and_can_be_missing() -> None:
    with pytest.raises(ValueError, match="the model has no chat template"):
        make_tokenizer().apply_chat_template([])
    with pytest.raises(ValueError, match="only one turn"):
        make_tokenizer(template_file="{{ raise_exception('only one turn') }}").apply_chat_template([])


def test_model_without_tokenizer_is_told_what_to_do() -> None:
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        Tokenizer({})


def test_bad_words_are_forbidden_with_and_without_a_space_before() -> None:
    tokenizer = make_tokenizer()

    sequences = tokenizer.bad_words_token_ids(["fox"])

    assert {tokenizer.decode(sequence) for sequence in sequences} == {"fox", " fox"}
