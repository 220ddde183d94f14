"""Tiny Qwen2-Audio and Qwen3-ASR models behind a gateway, asked by OpenAI's client: their tokens are the offline
`LLM`'s."""

import json
from base64 import b64encode
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from openai import BadRequestError, OpenAI

from proa_engine import LLM, SamplingParams
from support.audio_files import encode
from support.audio_prompt_models import as_released, make_qwen2_audio, make_qwen3_asr
from support.processes import engine_process, gateway_process, wait_for_models
from support.whisper_models import RATE, tone

# As Qwen2-Audio's, without the names of roles.
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if 'audio' in part %}<|AUDIO|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
# As Qwen3-ASR's: the texts of the system's messages, then all audios.
ASR_TEMPLATE = (
    "{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}|"
    "{% for message in messages if message.content is not string %}"
    "{% for part in message.content if part.type == 'audio' %}<|audio_pad|>{% endfor %}{% endfor %}|"
    "{% if add_generation_prompt %}A:{% endif %}"
)
NUM_TOKENS = 16
SIZE = ("--num-gpu-blocks-override=64", "--max-num-seqs=4")


def with_template(folder: Path, template: str) -> Path:
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return folder


@contextmanager
def served(folder: Path) -> Iterator[OpenAI]:
    with ExitStack() as stack:
        _, address = stack.enter_context(
            engine_process(f"--model={folder}", "--served-model-name=audio", *SIZE, env={"OMP_NUM_THREADS": "1"})
        )
        _, port = stack.enter_context(gateway_process(address))
        wait_for_models(port, ["audio"])
        yield stack.enter_context(
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        )


def ask(client: OpenAI, content: Any, *before: Any) -> Any:
    extra = {"return_token_ids": True, "ignore_eos": True}
    messages: Any = [*before, {"role": "user", "content": content}]
    return client.chat.completions.create(
        model="audio", messages=messages, temperature=0, max_tokens=NUM_TOKENS, extra_body=extra
    )


def offline(folder: Path, prompt: str, audios: Sequence[np.ndarray], *, ignore_eos: bool = True) -> Any:
    """Its greedy output for the prompt."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=ignore_eos)
    media = {"audio": [(each, RATE) for each in audios]}
    return LLM(str(folder), num_gpu_blocks_override=64).generate(
        [{"prompt": prompt, "multi_modal_data": media}], params
    )[0]


def test_a_chats_tokens_are_those_of_the_offline_llm(tmp_path: Path) -> None:
    folder = with_template(make_qwen2_audio(tmp_path / "qwen2_audio"), TEMPLATE)
    audios = [tone(0, 0.7), tone(3, 0.4)]
    parts = [
        {"type": "input_audio", "input_audio": {"data": b64encode(file).decode(), "format": "wav"}}
        for file in (encode(samples, RATE, "wav of floats") for samples in audios)
    ]
    content: Any = [{"type": "text", "text": "One "}, parts[0], {"type": "text", "text": " two "}, parts[1]]
    with served(folder) as client:
        first, again, other = (ask(client, each) for each in (content, content, [*content[:3], parts[0]]))
        long = encode(tone(0, 1.5), RATE, "wav of floats")
        with pytest.raises(BadRequestError, match="longer than 1 seconds"):
            ask(client, [{"type": "audio_url", "audio_url": {"url": f"data:;base64,{b64encode(long).decode()}"}}])
    expected = offline(folder, "One <|AUDIO|> two <|AUDIO|>", audios)
    served_ids = first.choices[0].model_extra["token_ids"]
    assert first.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert served_ids == again.choices[0].model_extra["token_ids"] == list(expected.outputs[0].token_ids)
    assert served_ids != other.choices[0].model_extra["token_ids"]


def test_grammars_and_called_tools_behind_audio_are_what_was_demanded(tmp_path: Path) -> None:
    folder = with_template(make_qwen2_audio(tmp_path / "qwen2_audio"), TEMPLATE + "{% if tools %}T{% endif %}")
    file = b64encode(encode(tone(0, 0.7), RATE, "wav of floats")).decode()
    part: Any = {"type": "input_audio", "input_audio": {"data": file, "format": "wav"}}
    schema: Any = {
        "type": "object",
        "properties": {"mood": {"enum": ["glad", "sad"]}},
        "required": ["mood"],
        "additionalProperties": False,
    }
    tool: Any = {"type": "function", "function": {"name": "note", "parameters": schema}}
    format: Any = {"type": "json_schema", "json_schema": {"name": "mood", "schema": schema}}
    common: Any = {"model": "audio", "messages": [{"role": "user", "content": [part]}], "temperature": 0}
    with served(folder) as client:
        written = client.chat.completions.create(**common, response_format=format).choices[0].message
        called = client.chat.completions.create(
            **common, tools=[tool], tool_choice={"type": "function", "function": {"name": "note"}}
        )
    (call,) = called.choices[0].message.tool_calls
    for text in (written.content, call.function.arguments):
        assert json.loads(text)["mood"] in ("glad", "sad")
    assert called.usage.prompt_tokens_details.audio_tokens > 0


def test_a_published_qwen3_asr_chats_and_transcribes_as_the_offline_llm_with_the_files_of_transformers(
    tmp_path: Path,
) -> None:
    folder = with_template(make_qwen3_asr(tmp_path / "transformers"), ASR_TEMPLATE)
    samples, system = tone(2, 1.2), {"role": "system", "content": "Ann"}
    file = encode(samples, RATE, "wav of floats")
    part = {"type": "input_audio", "input_audio": {"data": b64encode(file).decode(), "format": "wav"}}
    with served(as_released(folder, tmp_path / "published")) as client:
        chat = ask(client, [part], system)
        found, named = (
            client.audio.transcriptions.create(
                model="audio",
                file=file,
                prompt="Ann",
                include=["logprobs"],
                extra_body={"max_completion_tokens": NUM_TOKENS, **fields},
            )
            for fields in ({}, {"language": "en"})
        )
        with pytest.raises(BadRequestError, match="writes no timestamps"):
            client.audio.transcriptions.create(model="audio", file=file, response_format="srt")
        with pytest.raises(BadRequestError, match="does not know the language 'de', only en, zh"):
            client.audio.transcriptions.create(model="audio", file=file, language="de")
    expected = offline(folder, "Ann|<|audio_pad|>|A:", [samples])
    assert chat.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert chat.choices[0].model_extra["token_ids"] == list(expected.outputs[0].token_ids)
    for transcription, start in ((found, ""), (named, "language English<asr_text>")):
        output = offline(folder, f"Ann|<|audio_pad|>|A:{start}", [samples], ignore_eos=False).outputs[0]
        assert text_bytes(transcription) == bytes(each for each in output.token_ids if each < 256) != b""


def text_bytes(transcription: Any) -> bytes:
    """Of its tokens, each of which is a byte."""
    return b"".join(bytes(map(int, each.bytes)) for each in transcription.logprobs)
