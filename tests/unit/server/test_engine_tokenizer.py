"""The model's tokenizer in the engine."""

import json
from pathlib import Path

import pytest

from proa_engine.sources.folders import read_tokenizer_files
from proa_engine.tokenizer import ChatOptions, Tokenizer
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


def test_encode_and_decode_round_trip() -> None:
    tokenizer = make_tokenizer()

    assert tokenizer.decode(tokenizer.encode("naïve café 😀")) == "naïve café 😀"


def test_only_tokenizer_files_are_read(tmp_path: Path) -> None:
    assert read_tokenizer_files(None) == {}
    assert read_tokenizer_files(tmp_path) == {}
    for name in ("tokenizer.json", "chat_template.jinja", "model.safetensors"):
        (tmp_path / name).write_bytes(name.encode())

    assert set(read_tokenizer_files(tmp_path)) == {"tokenizer.json", "chat_template.jinja"}


@pytest.mark.parametrize("bos_token", ["<eos>", {"content": "<eos>"}])
def test_chat_template_gets_messages_and_special_tokens(bos_token: object) -> None:
    tokenizer = make_tokenizer(chat_template=TEMPLATE, bos_token=bos_token)

    ids = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}])

    assert ids == tokenizer.encode("<eos>user: Hi\n")


def test_template_file_takes_precedence_over_the_config_and_default_over_others() -> None:
    named = [{"name": "tools", "template": "tools"}, {"name": "default", "template": "default"}]

    assert make_tokenizer(chat_template=named).apply_chat_template([]) == make_tokenizer().encode("default")
    with_file = make_tokenizer(chat_template=named, template_file="file")
    assert with_file.apply_chat_template([]) == with_file.encode("file")


def test_template_error_and_missing_template_raise_value_error() -> None:
    with pytest.raises(ValueError, match="the model has no chat template"):
        make_tokenizer().apply_chat_template([])
    with pytest.raises(ValueError, match="only one turn"):
        make_tokenizer(template_file="{{ raise_exception('only one turn') }}").apply_chat_template([])


def test_messages_are_fitted_to_the_template(caplog: pytest.LogCaptureFixture) -> None:
    strict = "{% if messages[1:] | selectattr('role', 'equalto', 'system') | list %}{{ 1 / 0 }}{% endif %}" + TEMPLATE
    tokenizer = make_tokenizer(template_file=strict)
    developers = [{"role": "developer", "content": [{"type": "text", "text": text}]} for text in ("One.", "Two.")]

    text = tokenizer.render_chat([*developers, {"role": "user", "content": "Hi"}])

    assert text == "system: One.\n\n\nTwo.\nuser: Hi\n"
    assert "reads one system message" in caplog.text


def test_chat_template_gets_tools() -> None:
    tools = [{"type": "function", "function": {"name": "add"}}]
    tokenizer = make_tokenizer(template_file="{% for tool in tools %}{{ tool.function.name }}{% endfor %}")

    assert tokenizer.decode(tokenizer.apply_chat_template([], ChatOptions(tools=tools))) == "add"
    with pytest.raises(ValueError, match="does not use tools"):
        make_tokenizer(template_file=TEMPLATE).apply_chat_template([], ChatOptions(tools=tools))


def test_error_for_a_model_without_tokenizer_names_the_flag() -> None:
    with pytest.raises(ValueError, match="skip_tokenizer_init"):
        Tokenizer({})


def test_bad_words_have_variants_with_and_without_a_leading_space() -> None:
    tokenizer = make_tokenizer()

    sequences = tokenizer.bad_words_token_ids(["fox"])

    assert {tokenizer.decode(sequence) for sequence in sequences} == {"fox", " fox"}
