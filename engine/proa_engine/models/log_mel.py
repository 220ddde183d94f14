"""Log-mel features: what Whisper's encoder reads of an audio. The same bits as those of `transformers` on a CPU."""

import math

import torch
from torch import Tensor

from proa.contract import AudioInput

_MAX_HERTZ = 8000.0
_LINEAR_HERTZ = 1000.0  # Slaney's scale of mels is linear up to here, then logarithmic
_LINEAR_MELS = 15.0
_LOG_STEP = math.log(6.4) / 27.0
_FLOOR = 1e-10
_RANGE = 8.0  # powers of ten below the loudest value that are kept


class LogMel:
    """Computes features of a model's audio, of `num_bands` bands and one frame for each hop, on one device."""

    def __init__(self, audio: AudioInput, *, num_bands: int, fft_size: int, device: torch.device) -> None:
        """`fft_size`: samples of a frame."""
        self._fft_size = fft_size
        self._hop = audio.hop
        self._window = torch.hann_window(fft_size, device=device)
        self._filters = mel_filters(num_bands, audio.sampling_rate, fft_size).to(device, torch.float32)

    def __call__(self, samples: Tensor) -> Tensor:
        """samples [n] float32, of which n is more than half of `fft_size` -> features [num_bands, n // hop] float32"""
        spectrum = torch.stft(samples[None], self._fft_size, self._hop, window=self._window, return_complex=True)
        power = (spectrum[..., :-1].abs() ** 2).contiguous()  # the last frame is left out, as by Whisper
        mels = (self._filters.T @ power).clamp(min=_FLOOR).log10()[0]
        return (torch.maximum(mels, mels.max() - _RANGE) + 4.0) / 4.0


def mel_filters(num_bands: int, sampling_rate: int, fft_size: int) -> Tensor:
    """Return the filters [fft_size / 2 + 1, num_bands] float64: triangles at equal distances in mels, each of the same
    area."""
    mels = torch.linspace(0.0, _mels(_MAX_HERTZ), num_bands + 2, dtype=torch.float64)
    centers = torch.where(
        mels >= _LINEAR_MELS, _LINEAR_HERTZ * (_LOG_STEP * (mels - _LINEAR_MELS)).exp(), 200.0 * mels / 3.0
    )
    bins = torch.linspace(0, sampling_rate // 2, fft_size // 2 + 1, dtype=torch.float64)
    slopes, distances = centers[None] - bins[:, None], centers.diff()
    triangles = torch.minimum(-slopes[:, :-2] / distances[:-1], slopes[:, 2:] / distances[1:]).clamp(min=0)
    return triangles * (2.0 / (centers[2:] - centers[:-2]))


def _mels(hertz: float) -> float:
    """For a frequency of at least `_LINEAR_HERTZ`."""
    return _LINEAR_MELS + math.log(hertz / _LINEAR_HERTZ) / _LOG_STEP
