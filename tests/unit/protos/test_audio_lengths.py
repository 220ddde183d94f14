"""Numbers of an audio's tokens are those of `transformers`."""

import torch
from transformers.models.qwen2_audio.modeling_qwen2_audio import Qwen2AudioEncoder
from transformers.models.qwen3_asr.modeling_qwen3_asr import _get_feat_extract_output_lengths
from transformers.models.whisper.modeling_whisper import WhisperPreTrainedModel

from proa.contract import AudioInput, AudioLayer, hash_audio

HOP = 160
CONVOLUTIONS = (AudioLayer(kernel=3, stride=1, padding=1), AudioLayer(kernel=3, stride=2, padding=1))
FRAMES = torch.arange(1, 6001)


def audio_input(pad_to: int, *layers: AudioLayer, chunk: int = 0) -> AudioInput:
    return AudioInput(sampling_rate=16_000, hop=HOP, pad_to=pad_to, chunk=chunk, layers=layers, max_samples=480_000)


def lengths(input: AudioInput) -> list[int]:
    """The numbers of tokens of audios with so many frames; the last frame has one sample."""
    return [input.num_tokens((num_frames - 1) * HOP + 1) for num_frames in FRAMES.tolist()]


def test_whisper_has_the_same_number_for_every_audio() -> None:
    expected = WhisperPreTrainedModel._get_feat_extract_output_lengths(None, torch.tensor(3000))  # type: ignore[arg-type]
    input = audio_input(480_000, *CONVOLUTIONS)
    assert input.num_tokens(1) == input.num_tokens(480_000) == input.max_tokens == int(expected) == 1500


def test_voxtral_pads_to_whole_windows_whose_frames_it_joins_by_four() -> None:
    num_windows = -(-FRAMES // 3000)
    input = audio_input(480_000, *CONVOLUTIONS, AudioLayer(kernel=4, stride=4), chunk=3000)
    assert lengths(input) == (num_windows * 375).tolist()


def test_qwen2_audio_pools_pairs_of_frames() -> None:
    _, expected = Qwen2AudioEncoder._get_feat_extract_output_lengths(None, FRAMES)  # type: ignore[arg-type]
    assert lengths(audio_input(HOP, *CONVOLUTIONS, AudioLayer(kernel=2, stride=2))) == expected.tolist()


def test_qwen3_asr_has_three_convolutions_within_a_second() -> None:
    expected = _get_feat_extract_output_lengths(FRAMES)
    layers = [AudioLayer(kernel=3, stride=2, padding=1)] * 3
    assert lengths(audio_input(HOP, *layers, chunk=100)) == expected.tolist()


def test_short_audio_has_the_tokens_of_the_shortest() -> None:
    layers = (AudioLayer(kernel=3, stride=2, padding=1),) * 3
    input = AudioInput(sampling_rate=16_000, hop=HOP, pad_to=1, min_samples=8000, layers=layers, max_samples=16_000)
    assert [input.num_tokens(count) for count in (1, 8000, 8159, 9119, 9120, 9280)] == [7, 7, 7, 7, 8, 8]


def test_no_samples_are_no_tokens() -> None:
    assert audio_input(HOP, *CONVOLUTIONS).num_tokens(0) == 0


def test_the_hash_is_that_of_the_number_of_samples_and_the_samples() -> None:
    assert hash_audio(bytes(8)).hex() == "b76875c50ef704dbbf7f02c982445971"
