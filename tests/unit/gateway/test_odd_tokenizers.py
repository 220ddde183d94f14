"""Tokenizers whose files are damaged or odd: each works, or is refused by one sentence with the file's name."""

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from tokenizers import AddedToken

from proa.chat_template import ChatTemplateError
from proa_engine.tokenizer import Tokenizer as EngineTokenizer
from proa_gateway.tokenizer import Tokenizer
from support.odd_tokenizer_files import ODD_FILES, OddFile
from support.tokenizers import byte_level_tokenizer

MESSAGES = [{"role": "user", "content": "Hi"}]
SENTENCE = r"{}[^\n]*\Z"  # one line
odd_files = pytest.mark.parametrize("odd", ODD_FILES.values(), ids=ODD_FILES)


@pytest.fixture
def executor() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as executor:
        yield executor


@odd_files
def test_the_gateway_serves_or_refuses_it(odd: OddFile, executor: ThreadPoolExecutor) -> None:
    if odd.refusal is not None:
        with pytest.raises(ValueError, match=SENTENCE.format(re.escape(odd.refusal))):
            Tokenizer(odd.files(), executor)
        return
    tokenizer = Tokenizer(odd.files(), executor)
    assert tokenizer.decode(tokenizer.encode_now("Hi")) == "Hi"
    if odd.chat_error is not None:
        assert re.match(SENTENCE.format(re.escape(odd.chat_error)), tokenizer.template_error)
        assert tokenizer.chat_template is None
    else:
        assert tokenizer.template_error == ""


@odd_files
def test_offline_it_works_or_is_refused(odd: OddFile) -> None:
    if odd.refusal is not None and odd.name in ("tokenizer.json", "tokenizer_config.json"):
        with pytest.raises(ValueError, match=SENTENCE.format(re.escape(odd.refusal))):
            EngineTokenizer(odd.files())
        return
    tokenizer = EngineTokenizer(odd.files())
    assert tokenizer.decode(tokenizer.encode("Hi")) == "Hi"
    if odd.chat_error is not None:
        with pytest.raises(ValueError, match=SENTENCE.format(re.escape(odd.chat_error))):
            tokenizer.render_chat(MESSAGES)


@pytest.mark.parametrize("contents", [["<" + "a" * 100_000], ["a" * size + "b" for size in range(1, 900)]])
def test_special_tokens_that_would_take_gigabytes_or_a_deep_stack_are_refused(
    contents: list[str], executor: ThreadPoolExecutor
) -> None:
    raw = byte_level_tokenizer()
    raw.add_special_tokens([AddedToken(content, normalized=False) for content in contents])
    with pytest.raises(ValueError, match=r"tokenizer\.json has .*special tokens that"):
        Tokenizer({"tokenizer.json": raw.to_str().encode()}, executor)


def test_a_template_that_makes_a_lone_surrogate_is_refused(executor: ThreadPoolExecutor) -> None:
    files = OddFile("chat_template.jinja", rb"{{ '\ud800' }}").files()
    template = Tokenizer(files, executor).chat_template
    assert template is not None
    with pytest.raises(ChatTemplateError, match="surrogates not allowed"):
        template.render(MESSAGES)
