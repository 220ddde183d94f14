"""Fake speech models, a Whisper and one with a chat template: tokenizers, prompts, texts by how loud an audio is."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken, Tokenizer

from proa.contract import AsrPrompts, AudioInput, AudioLayer, WhisperPrompts
from proa.contract.pb import to_pb
from proa.engine.v1 import core_pb2, service_pb2
from support.audio_files import Samples, tone
from support.fake_engine import EOS, FakeEngine, Reply, Script, prompt_ids
from support.tokenizers import byte_level_tokenizer

RATE = 8000
WINDOW_SECONDS = 2
LANGUAGES = ("en", "de", "ja")
_SPECIAL = (
    *("<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
)
_ASR_SPECIAL, MARKER = ("<|im_start|>", "<|im_end|>", "<|audio_start|>", "<|audio_end|>", "<|audio_pad|>"), "<asr_text>"
# As Qwen3-ASR's: the texts of the system's messages, then all audios.
_ASR_TEMPLATE = (
    "<|im_start|>system\n{% for message in messages if message.role == 'system' %}{{ message.content }}{% endfor %}"
    "<|im_end|>\n<|im_start|>user\n{% for message in messages if message.content is not string %}"
    "{% for part in message.content if part.type == 'audio' %}<|audio_start|><|audio_pad|><|audio_end|>{% endfor %}"
    "{% endfor %}<|im_end|>\n{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TIMESTAMPS = tuple(f"<|{0.02 * index:.2f}|>" for index in range(101))


@cache
def tokenizer_json() -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _SPECIAL])
    tokenizer.add_tokens([AddedToken(each) for each in _TIMESTAMPS])
    return tokenizer.to_str()


@cache
def ids() -> dict[str, int]:
    """Of Whisper's added tokens, by their text."""
    return _added(tokenizer_json())


def _added(tokenizer: str) -> dict[str, int]:
    return {each["content"]: each["id"] for each in json.loads(tokenizer)["added_tokens"]}


def audio_input(*, multilingual: bool = True) -> AudioInput:
    """Windows of 2 s at 8,000 samples a second: 100 tokens."""
    token = ids()
    prompts = WhisperPrompts(
        decoder_start_token_id=token["<|startoftranscript|>"],
        languages={code: token[f"<|{code}|>"] for code in LANGUAGES} if multilingual else {},
        tasks={each: token[f"<|{each}|>"] for each in ("translate", "transcribe")} if multilingual else {},
        no_timestamps_token_id=token["<|notimestamps|>"],
        timestamp_begin_id=token["<|0.00|>"],
        prev_sot_token_id=token["<|startofprev|>"],
        no_speech_token_id=token["<|nospeech|>"],
        suppress_tokens=(5, 6),
        begin_suppress_tokens=(7, EOS),
        max_initial_timestamp_index=50,
        max_target_positions=64,
        is_multilingual=multilingual,
    )
    return AudioInput(
        sampling_rate=RATE,
        hop=80,
        pad_to=WINDOW_SECONDS * RATE,
        layers=(AudioLayer(kernel=3, stride=1, padding=1), AudioLayer(kernel=3, stride=2, padding=1)),
        max_samples=WINDOW_SECONDS * RATE,
        cross_attention=True,
        whisper=prompts,
    )


def hear(text_of: Callable[[Samples], str], engine: FakeEngine, language: str = "de") -> Script:
    """A script that replies with the text of the request's audio, or with the language if it is asked for it."""
    tokenizer = byte_level_tokenizer()

    def reply(request: core_pb2.EngineCoreRequest) -> Reply:
        if request.sampling_params.allowed_token_ids:
            return Reply([ids()[f"<|{language}|>"]])
        samples = np.frombuffer(engine.samples[request.audios[0].hash], "<f4")
        return Reply([*tokenizer.encode(text_of(samples)).ids, EOS])

    return reply


def level(samples: Samples) -> str:
    """A text for each window of `levels`: its number."""
    return f" Window {round(10 * float(np.abs(samples).max()))}."


def levels(*numbers: int) -> Samples:
    """Audio that is cut into windows of these levels, in tenths of full scale: 1.5 s each, with pauses of 0.3 s."""
    pause = np.zeros(round(0.3 * RATE), np.float32)
    parts = [part for each in numbers for part in (pause, tone(1.5, RATE, level=each / 10))]
    return np.concatenate(parts[1:])


def whisper_engine(*, multilingual: bool = True, language: str = "de", **settings: Any) -> FakeEngine:
    config = {"eos_token": "<eos>"}
    files = {"tokenizer.json": tokenizer_json().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    engine = FakeEngine(files=files, max_model_len=64, **settings)
    engine.script = hear(level, engine, language)
    engine.info.vocab_size = 1024
    engine.info.audios.CopyFrom(to_pb(service_pb2.AudioInput, audio_input(multilingual=multilingual)))
    return engine


@cache
def asr_tokenizer_json() -> str:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_special_tokens([AddedToken(each, special=True) for each in _ASR_SPECIAL])
    tokenizer.add_tokens([AddedToken(MARKER)])
    return tokenizer.to_str()


@cache
def asr_ids() -> dict[str, int]:
    """Of the added tokens, by their text."""
    return _added(asr_tokenizer_json())


def asr_engine(**settings: Any) -> FakeEngine:
    """Its model reads windows of 2 s at 8,000 samples a second, 20 tokens, and writes `language German<asr_text>` first
    unless its prompt ends with the marker."""
    config = {"eos_token": "<eos>", "chat_template": _ASR_TEMPLATE}
    files = {"tokenizer.json": asr_tokenizer_json().encode(), "tokenizer_config.json": json.dumps(config).encode()}
    tokenizer = Tokenizer.from_str(asr_tokenizer_json())
    marker_id, token_id = asr_ids()[MARKER], asr_ids()["<|audio_pad|>"]
    input = AudioInput(
        sampling_rate=RATE,
        hop=RATE // 10,
        pad_to=RATE // 10,
        max_samples=WINDOW_SECONDS * RATE,
        token_id=token_id,
        token="<|audio_pad|>",
        placeholder="<|audio_pad|>",
        asr=AsrPrompts(marker_id=marker_id, marker=MARKER, languages={"de": "German", "ja": "Japanese"}),
    )
    engine = FakeEngine(files=files, max_model_len=256, **settings)

    def reply(request: core_pb2.EngineCoreRequest) -> Reply:
        text = level(np.frombuffer(engine.samples[request.audios[0].hash], "<f4"))
        start = "" if prompt_ids(request)[-1] == marker_id else f"language German{MARKER}"
        return Reply([*tokenizer.encode(start + text).ids, EOS])

    engine.script = reply
    engine.info.vocab_size = 1024
    engine.info.audios.CopyFrom(to_pb(service_pb2.AudioInput, input))
    return engine
