"""A fake Whisper model: its tokenizer, its prompts, and texts by how loud an audio is."""

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from tokenizers import AddedToken

from proa.contract import AudioInput, AudioLayer, WhisperPrompts
from proa.contract.pb import to_pb
from proa.engine.v1 import core_pb2, service_pb2
from support.audio_files import Samples, tone
from support.fake_engine import EOS, FakeEngine, Reply, Script
from support.tokenizers import byte_level_tokenizer

RATE = 8000
WINDOW_SECONDS = 2
LANGUAGES = ("en", "de", "ja")
_SPECIAL = (
    *("<|startoftranscript|>", *(f"<|{code}|>" for code in LANGUAGES), "<|translate|>", "<|transcribe|>"),
    *("<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"),
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
    """Of the added tokens, by their text."""
    return {each["content"]: each["id"] for each in json.loads(tokenizer_json())["added_tokens"]}


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
