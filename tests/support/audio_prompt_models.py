"""Tiny models that read audio in their prompts, Qwen2-Audio and Qwen3-ASR, and their greedy tokens by `transformers`
for a prompt with audios of at most some seconds."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from proa.contract import SamplingParams
from proa.image.placeholders import place_media
from support.engine import Engine, request, run
from support.greedy import MARGIN, Expected
from support.tiny_models import EOS_TOKEN_ID, VOCAB_SIZE, write_tokenizer
from support.whisper_models import NUM_POSITIONS, RATE, audio_of

AUDIO_TOKEN: Final = VOCAB_SIZE


def make_qwen2_audio(folder: Path, seed: int = 4) -> Path:
    """Write the model to `folder`; returns it."""
    from transformers import Qwen2AudioConfig, Qwen2AudioForConditionalGeneration, WhisperFeatureExtractor

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen2AudioConfig(
        audio_config={
            "model_type": "qwen2_audio_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 80,
            "max_source_positions": NUM_POSITIONS,
            "initializer_range": 0.14,
        },
        text_config={
            "model_type": "qwen2",
            "vocab_size": VOCAB_SIZE + 1,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 256,
            "initializer_range": 0.14,
            "bos_token_id": None,
            "eos_token_id": EOS_TOKEN_ID,
        },
        audio_token_index=AUDIO_TOKEN,
    )
    config.initializer_range = 0.14
    torch.manual_seed(seed)
    Qwen2AudioForConditionalGeneration(config).save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=80, chunk_length=1).save_pretrained(folder)
    return _with_tokenizer(folder, "<|AUDIO|>")


def make_qwen3_asr(folder: Path, seed: int = 4) -> Path:
    """Write the model to `folder`; returns it. Its encoder attends within two seconds."""
    from transformers import Qwen3ASRConfig, Qwen3ASRFeatureExtractor, Qwen3ASRForConditionalGeneration

    folder.mkdir(parents=True, exist_ok=True)
    config = Qwen3ASRConfig(
        audio_config={
            "model_type": "qwen3_asr_encoder",
            "d_model": 32,
            "encoder_layers": 2,
            "encoder_attention_heads": 4,
            "encoder_ffn_dim": 48,
            "num_mel_bins": 80,
            "output_dim": 64,
            "n_window": 50,
            "n_window_infer": 200,
            "downsample_hidden_size": 8,
            "initializer_range": 0.14,
        },
        text_config={
            "model_type": "qwen3",
            "vocab_size": VOCAB_SIZE + 2,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "tie_word_embeddings": True,
            "max_position_embeddings": 256,
            "initializer_range": 0.14,
            "bos_token_id": None,
            "eos_token_id": EOS_TOKEN_ID,
        },
        audio_token_id=AUDIO_TOKEN,
        pad_token_id=EOS_TOKEN_ID,
        eos_token_id=EOS_TOKEN_ID,
        initializer_range=0.14,
    )
    torch.manual_seed(seed)
    Qwen3ASRForConditionalGeneration(config).save_pretrained(folder)
    Qwen3ASRFeatureExtractor(feature_size=80).save_pretrained(folder)
    return _with_tokenizer(folder, "<|audio_pad|>", "<asr_text>")


def as_released(folder: Path, copy: Path) -> Path:
    """Write a copy of Qwen3-ASR in the form of Qwen's own library, which the published checkpoints have: names of
    weights, fields of config.json, the feature extractor's file. Returns it."""
    from transformers import WhisperFeatureExtractor

    shutil.copytree(folder, copy)
    stored = json.loads((copy / "config.json").read_text())
    thinker = {name: stored[name] for name in ("model_type", "audio_config", "text_config", "audio_token_id")}
    rope = thinker["text_config"].pop("rope_parameters")
    scaling = {"interleaved": True, "mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"}
    thinker["text_config"] |= {"rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    config = {name: stored[name] for name in ("architectures", "model_type")}
    config |= {"support_languages": ["Chinese", "English"], "thinker_config": thinker | {"dtype": stored["dtype"]}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS_TOKEN_ID]}))
    WhisperFeatureExtractor(feature_size=80).save_pretrained(copy)
    names = (
        ("model.language_model.", "thinker.model."),
        ("model.multi_modal_projector.linear_", "thinker.audio_tower.proj"),
        ("model.", "thinker."),
    )
    tensors = load_file(copy / "model.safetensors")
    first = [(name, next(each for each in names if name.startswith(each[0]))) for name in tensors]
    save_file({new + name.removeprefix(old): tensors[name] for name, (old, new) in first}, copy / "model.safetensors")
    return copy


def _with_tokenizer(folder: Path, audio_token: str, *others: str) -> Path:
    write_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([audio_token])
    tokenizer.add_tokens(list(others))
    tokenizer.save(str(folder / "tokenizer.json"))
    fields = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(fields | {"chat_template": None}))
    return folder


def qwen2_audio_tokens(samples: np.ndarray) -> int:
    """Their number, as `Qwen2AudioProcessor` has it."""
    num_frames = -(-samples.size // 160)
    return (((num_frames - 1) // 2 + 1) - 2) // 2 + 1


def qwen3_asr_tokens(samples: np.ndarray) -> int:
    """Their number, as `Qwen3ASRProcessor` has it."""
    from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths

    return int(_get_feat_extract_output_lengths(max(samples.size, 8000) // 160))


def split(
    parts: Sequence[int | np.ndarray], num_tokens: Callable[[np.ndarray], int] = qwen2_audio_tokens
) -> tuple[list[int], list[np.ndarray]]:
    """The prompt of tokens and audios, with so many tokens for each of its audios, and the audios."""
    audios = [part for part in parts if isinstance(part, np.ndarray)]
    prompt = list[int]()
    for part in parts:
        prompt += [part] if isinstance(part, int) else [AUDIO_TOKEN] * num_tokens(part)
    return prompt, audios


def run_with_audio(
    engine: Engine,
    prompts: Sequence[Sequence[int | np.ndarray]],
    params: SamplingParams,
    num_tokens: Callable[[np.ndarray], int] = qwen2_audio_tokens,
) -> list[Sequence[int]]:
    """Return the tokens of each prompt of tokens and audios."""
    input = engine.executor.started.model_config.audios
    assert input is not None
    requests = []
    for index, parts in enumerate(prompts):
        prompt, arrays = split(parts, num_tokens)
        audios = [replace(audio_of(each), num_tokens=num_tokens(each)) for each in arrays]
        placed = place_media(prompt, audios, input.input)
        requests.append(replace(request(str(index), prompt, params), audios=placed))
    results = run(engine, requests)
    return [results[str(index)].token_ids for index in range(len(prompts))]


@torch.inference_mode()
def greedy_with_audio(
    folder: Path, cases: Sequence[tuple[Sequence[int], Sequence[np.ndarray]]], num_tokens: int
) -> list[Expected]:
    """Of each prompt, with its audios, by itself, in float32, beyond end tokens."""
    from transformers import AutoFeatureExtractor, AutoModelForMultimodalLM

    extractor = AutoFeatureExtractor.from_pretrained(folder)
    model = AutoModelForMultimodalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    return [_greedy(model, extractor, list(prompt), audios, num_tokens) for prompt, audios in cases]


def _greedy(model: Any, extractor: Any, prompt: list[int], audios: Sequence[np.ndarray], num_tokens: int) -> Expected:
    inputs: dict[str, torch.Tensor] = {}
    if audios:
        is_whisper = type(extractor).__name__ == "WhisperFeatureExtractor"
        read = extractor(
            list(audios),
            sampling_rate=RATE,
            return_tensors="pt",
            return_attention_mask=True,
            padding="max_length" if is_whisper else True,
        )
        mask = "feature_attention_mask" if is_whisper else "input_features_mask"
        inputs = {"input_features": read.input_features, mask: read.attention_mask}
    logits, tokens = list[torch.Tensor](), list(prompt)
    for _ in range(num_tokens):
        ids = torch.tensor([tokens])
        output = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False, **inputs)
        logits.append(output.logits[0, -1])
        tokens.append(int(logits[-1].argmax()))
    best = torch.stack(logits).topk(2)
    unsure = (best.values[:, 0] - best.values[:, 1] < MARGIN).nonzero()
    return Expected(best.indices[:, 0].tolist(), int(unsure[0]) if len(unsure) else num_tokens)
