"""Tiny Whisper models: random weights, audio of at most a second, a byte-level tokenizer with Whisper's special tokens.

And their greedy tokens by `transformers` for a prompt and an audio.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from tokenizers import Tokenizer

from proa.contract import Audio, EngineCoreRequest, PoolingParams, PoolingTask, SamplingParams, hash_audio
from proa.text import Vocabulary
from support.audio_files import encode
from support.engine import Result, request
from support.greedy import MARGIN, Expected
from support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer

RATE: Final = 16_000
NUM_POSITIONS: Final = 50  # of the encoder: a second
MAX_TARGET_POSITIONS: Final = 64
ALIGNMENT_HEADS: Final = [[1, 0], [2, 3], [2, 1]]
_SPECIAL = ("startoftranscript", "en", "de", "transcribe", "translate", "startofprev", "nospeech", "notimestamps")
_TIMES = tuple(f"{number / NUM_POSITIONS:.2f}" for number in range(NUM_POSITIONS + 1))
TOKENS: Final = {name: VOCAB_SIZE + index for index, name in enumerate((*_SPECIAL, *_TIMES))}
PROMPT: Final = [TOKENS[name] for name in ("startoftranscript", "en", "transcribe", "notimestamps")]


def make_whisper(folder: Path, seed: int = 0, *, window_seconds: int = 1, **overrides: Any) -> Path:
    """Write the model to `folder`; returns it. `overrides` are fields of config.json."""
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    config = WhisperConfig(
        vocab_size=VOCAB_SIZE + len(TOKENS),
        d_model=64,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=96,
        decoder_layers=3,
        decoder_attention_heads=4,
        decoder_ffn_dim=96,
        num_mel_bins=80,
        max_source_positions=window_seconds * NUM_POSITIONS,
        max_target_positions=MAX_TARGET_POSITIONS,
        init_std=0.2,
        decoder_start_token_id=TOKENS["startoftranscript"],
        bos_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
        **overrides,
    )
    torch.manual_seed(seed)
    model = WhisperForConditionalGeneration(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("bias", "norm.weight")):  # which would begin as 0 and 1
            parameter.data += torch.randn_like(parameter) * 0.1
    model.generation_config = GenerationConfig(
        decoder_start_token_id=TOKENS["startoftranscript"],
        eos_token_id=EOS_TOKEN_ID,
        pad_token_id=EOS_TOKEN_ID,
        lang_to_id={"<|en|>": TOKENS["en"], "<|de|>": TOKENS["de"]},
        task_to_id={"transcribe": TOKENS["transcribe"], "translate": TOKENS["translate"]},
        no_timestamps_token_id=TOKENS["notimestamps"],
        prev_sot_token_id=TOKENS["startofprev"],
        suppress_tokens=[1, 2],
        begin_suppress_tokens=[220, EOS_TOKEN_ID],
        max_initial_timestamp_index=25,
        is_multilingual=True,
        alignment_heads=ALIGNMENT_HEADS,
    )
    model.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80, chunk_length=window_seconds).save_pretrained(folder)
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([f"<|{name}|>" for name in TOKENS])
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    del fields["chat_template"]
    (folder / "tokenizer_config.json").write_text(json.dumps(fields))
    return folder


def tone(seed: int, seconds: float = 1.0) -> np.ndarray:
    """A few tones in noise, float32."""
    rng = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tones = np.sin(2 * np.pi * rng.uniform(100, 6000, 4)[:, None] * times).sum(0)
    return np.asarray((tones + rng.standard_normal(times.size)) * 0.1, np.float32)


def file_of(*seeds: int) -> bytes:
    """A file with an audio of 0.7 s for each seed, and pauses between them in which it is cut."""
    pause = np.zeros(round(0.2 * RATE), np.float32)
    parts = [part for seed in seeds for part in (pause, tone(seed, 0.7))]
    return encode(np.clip(np.concatenate(parts[1:]), -1, 1), RATE, "wav of floats")


def audio_of(samples: np.ndarray) -> Audio:
    data = samples.astype("<f4").tobytes()
    return Audio(hash=hash_audio(data), num_samples=samples.size, samples=data)


def transcription(
    request_id: str, samples: np.ndarray, params: SamplingParams, prompt: Sequence[int] = PROMPT
) -> EngineCoreRequest:
    return replace(request(request_id, prompt, params), audios=(audio_of(samples),))


@torch.inference_mode()
def greedy_transcriptions(
    folder: Path, cases: Sequence[tuple[np.ndarray, Sequence[int]]], num_tokens: int
) -> list[Expected]:
    """Of each audio and prompt by itself, in float32, beyond end tokens."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    model.eval()
    return [_greedy(model, extractor, samples, list(prompt), num_tokens) for samples, prompt in cases]


@torch.inference_mode()
def read_shares(folder: Path, samples: np.ndarray, token_ids: Sequence[int]) -> torch.Tensor:
    """How much the alignment heads of `transformers` read of each token of an audio, [heads, tokens, audio tokens]."""
    from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

    extractor = WhisperFeatureExtractor.from_pretrained(folder)
    model = WhisperForConditionalGeneration.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    output = model.eval()(features, decoder_input_ids=torch.tensor([token_ids]), output_attentions=True)
    return torch.stack([output.cross_attentions[layer][0, head] for layer, head in ALIGNMENT_HEADS])


def aligned(
    request_id: str, samples: np.ndarray, prompt: Sequence[int], num_kept: int | None = None
) -> EngineCoreRequest:
    """A request for how much each token of a prompt reads of the first `num_kept` tokens of an audio; None: of all."""
    params = PoolingParams(task=PoolingTask.ALIGN, dimensions=num_kept)
    return replace(transcription(request_id, samples, SamplingParams(), prompt), pooling_params=params)


def check_alignment(folder: Path, samples: np.ndarray, request: EngineCoreRequest, result: Result) -> None:
    """That the result of a request of `aligned` is what `transformers` computes."""
    from transformers.models.whisper.generation_whisper import _median_filter

    assert request.pooling_params is not None
    number = request.pooling_params.dimensions or NUM_POSITIONS
    read = read_shares(folder, samples, request.prompt_token_ids)[..., :number]
    deviation, mean = torch.std_mean(read, dim=-2, keepdim=True, correction=0)
    expected = _median_filter((read - mean) / deviation, 7).mean(dim=0)
    np.testing.assert_allclose(result.values, expected, atol=1e-3)


def greedy_text(folder: Path, samples: np.ndarray, language: str, num_tokens: int) -> list[bytes]:
    """The greedy tokens of `transformers` that are text, none of which the model suppresses."""
    prompt = [PROMPT[0], TOKENS[language], *PROMPT[2:]]
    (expected,) = greedy_transcriptions(folder, [(samples, prompt)], num_tokens)
    assert expected.num_sure == num_tokens
    assert not {*expected.token_ids} & {1, 2, 220, EOS_TOKEN_ID}
    vocabulary = Vocabulary(Tokenizer.from_file(str(folder / "tokenizer.json")))
    return [vocabulary.token_bytes(each) for each in expected.token_ids if each not in TOKENS.values()]


def _greedy(model: Any, extractor: Any, samples: np.ndarray, prompt: list[int], num_tokens: int) -> Expected:
    features = extractor(samples, sampling_rate=RATE, return_tensors="pt").input_features
    encoded, cache, step_input, logits = model.model.encoder(features), None, prompt, []
    for _ in range(num_tokens):
        output = model(
            encoder_outputs=encoded,
            decoder_input_ids=torch.tensor([step_input]),
            past_key_values=cache,
            use_cache=True,
        )
        cache = output.past_key_values
        logits.append(output.logits[0, -1])
        step_input = [int(logits[-1].argmax())]
    best = torch.stack(logits).topk(2)
    unsure = (best.values[:, 0] - best.values[:, 1] < MARGIN).nonzero()
    return Expected(best.indices[:, 0].tolist(), int(unsure[0]) if len(unsure) else num_tokens)
