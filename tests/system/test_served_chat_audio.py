"""A tiny Qwen2-Audio model behind a gateway, asked in chats by OpenAI's client: its tokens are the offline `LLM`'s."""

import json
from base64 import b64encode
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from openai import BadRequestError, OpenAI

from proa_engine import LLM, SamplingParams
from support.audio_files import encode
from support.audio_prompt_models import make_qwen2_audio
from support.processes import engine_process, gateway_process, wait_for_models
from support.whisper_models import RATE, tone

# As Qwen2-Audio's, without the names of roles.
TEMPLATE = (
    "{% for message in messages %}{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if 'audio' in part %}<|AUDIO|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}{% endfor %}"
)
NUM_TOKENS = 16
SIZE = ("--num-gpu-blocks-override=64", "--max-num-seqs=4")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = make_qwen2_audio(tmp_path_factory.mktemp("qwen2_audio"))
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": TEMPLATE}))
    return folder


def test_a_chats_tokens_are_those_of_the_offline_llm(folder: Path) -> None:
    audios = [tone(0, 0.7), tone(3, 0.4)]
    parts = [
        {"type": "input_audio", "input_audio": {"data": b64encode(file).decode(), "format": "wav"}}
        for file in (encode(samples, RATE, "wav of floats") for samples in audios)
    ]
    content: Any = [{"type": "text", "text": "One "}, parts[0], {"type": "text", "text": " two "}, parts[1]]
    with ExitStack() as stack:
        _, address = stack.enter_context(
            engine_process(f"--model={folder}", "--served-model-name=audio", *SIZE, env={"OMP_NUM_THREADS": "1"})
        )
        _, port = stack.enter_context(gateway_process(address))
        wait_for_models(port, ["audio"])
        client = stack.enter_context(
            OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none", max_retries=0, timeout=60)
        )

        def ask(content: Any) -> Any:
            extra = {"return_token_ids": True, "ignore_eos": True}
            messages: Any = [{"role": "user", "content": content}]
            return client.chat.completions.create(
                model="audio", messages=messages, temperature=0, max_tokens=NUM_TOKENS, extra_body=extra
            )

        first, again, other = ask(content), ask(content), ask([*content[:3], parts[0]])
        long = encode(tone(0, 1.5), RATE, "wav of floats")
        with pytest.raises(BadRequestError, match="longer than 1 seconds"):
            ask([{"type": "audio_url", "audio_url": {"url": f"data:;base64,{b64encode(long).decode()}"}}])
    llm = LLM(str(folder), num_gpu_blocks_override=64)
    prompt = {
        "prompt": "One <|AUDIO|> two <|AUDIO|>",
        "multi_modal_data": {"audio": [(each, RATE) for each in audios]},
    }
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True)
    expected = llm.generate([prompt], params)[0]
    served = first.choices[0].model_extra["token_ids"]
    assert first.model_extra["prompt_token_ids"] == expected.prompt_token_ids
    assert served == again.choices[0].model_extra["token_ids"] == list(expected.outputs[0].token_ids)
    assert served != other.choices[0].model_extra["token_ids"]
