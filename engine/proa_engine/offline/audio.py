"""Audio for the offline `LLM`, as vLLM's takes it: `multi_modal_data` of a prompt, `{"audio": (array, rate)}`."""

import reprlib
from collections.abc import Mapping, Sequence
from typing import Any

from proa.contract import Audio, AudioInput, hash_audio


def audios_of(data: Mapping[str, Any]) -> list[object]:
    """The audios of a prompt's `multi_modal_data`: one, or a list of several."""
    found = data.get("audio")
    if isinstance(found, list):
        return found
    return [] if found is None else [found]


def prepare_audios(audios: Sequence[object], audio_input: AudioInput) -> tuple[Audio, ...]:
    """Raises `ValueError` for what is no audio of one channel at the model's rate."""
    return tuple(_prepare(each, audio_input) for each in audios)


def _prepare(given: object, audio_input: AudioInput) -> Audio:
    """`given`: an array [n], and its sampling rate."""
    import numpy as np  # on use, as torch, whose threads it shares

    if not isinstance(given, tuple) or len(given) != 2:
        raise ValueError(f"an audio must be (array, sampling rate), got {reprlib.repr(given)}")
    array, rate = given
    if rate != audio_input.sampling_rate:
        raise ValueError(
            f"the model reads audio of {audio_input.sampling_rate} samples a second, got {rate}: resample it first, "
            "for example with soxr.resample"
        )
    samples = np.asarray(array)
    if samples.ndim != 1 or samples.dtype.kind != "f":
        raise ValueError(
            f"an audio must be an array of floats with one channel, got {samples.dtype} of shape {list(samples.shape)}"
        )
    if not np.isfinite(samples).all():
        raise ValueError("an audio has a sample that is infinite or not a number")
    data = samples.astype("<f4").tobytes()
    num_tokens = 0 if audio_input.cross_attention else audio_input.num_tokens(samples.size)
    return Audio(hash=hash_audio(data), num_tokens=num_tokens, num_samples=samples.size, samples=data)
