"""Features have the bits of `transformers`' on a CPU."""

import numpy as np
import pytest
import torch
from transformers import WhisperFeatureExtractor

from proa.contract import AudioInput
from proa_engine.models.log_mel import LogMel, mel_filters

RATE, FFT_SIZE = 16_000, 400


def features_of(samples: torch.Tensor, num_bands: int) -> torch.Tensor:
    audio = AudioInput(sampling_rate=RATE, hop=160, pad_to=1, max_samples=30 * RATE)
    return LogMel(audio, num_bands=num_bands, fft_size=FFT_SIZE, device=samples.device)(samples)


def noise(seconds: float, scale: float) -> np.ndarray:
    num_samples = int(seconds * RATE)
    envelope = np.linspace(1, 0, num_samples)
    return (np.random.default_rng(1).standard_normal(num_samples) * scale * envelope).astype(np.float32)


@pytest.mark.parametrize("num_bands", [80, 128])
def test_filters_are_those_of_transformers(num_bands: int) -> None:
    expected = WhisperFeatureExtractor(feature_size=num_bands).mel_filters
    filters = mel_filters(num_bands, RATE, FFT_SIZE)
    assert torch.equal(filters.float(), torch.from_numpy(expected).float())


@pytest.mark.parametrize("num_bands", [80, 128])
@pytest.mark.parametrize(("seconds", "scale"), [(0.0, 1.0), (0.3, 1e-3), (1.0, 0.3), (2.0, 1.0), (2.5, 40.0)])
def test_features_have_the_same_bits(num_bands: int, seconds: float, scale: float) -> None:
    extractor = WhisperFeatureExtractor(feature_size=num_bands, chunk_length=2)
    audio = noise(seconds, scale)
    expected = extractor(audio, sampling_rate=RATE, return_tensors="pt").input_features[0]
    samples = torch.zeros(2 * RATE)
    samples[: audio.size] = torch.from_numpy(audio)[: samples.numel()]
    assert torch.equal(features_of(samples, num_bands), expected)


def test_thirty_seconds_have_three_thousand_frames_with_the_same_bits() -> None:
    audio = noise(30, 0.1)
    expected = WhisperFeatureExtractor()(audio, sampling_rate=RATE, return_tensors="pt").input_features[0]
    features = features_of(torch.from_numpy(audio), 80)
    assert features.shape == (80, 3000)
    assert torch.equal(features, expected)
